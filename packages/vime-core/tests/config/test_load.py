"""Overlay, overrides, plugin-owned sections, and errors that name key, value and remedy."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tomlkit
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from vime_core.config.frozen import thaw
from vime_core.config.layers import overlay, parse_override
from vime_core.config.load import load_config
from vime_core.config.schema import RunConfig
from vime_core.config.validate import resolved_table, validate
from vime_core.data.files import JsonlOptions
from vime_core.errors import ConfigError, PluginError, VimeError
from vime_core.plugins import (
    AdvantageEstimator,
    DatasetSource,
    LauncherEntry,
    Loss,
    ModelSource,
    Reward,
    RolloutEngine,
    TrainerBackend,
    hookimpl,
)
from vime_core.plugins.manager import PluginInfo, PluginManager
from vime_core.plugins.types import Options


class ShopOptions(Options):
    size: int = 3
    colour: str = "red"
    extra: dict[str, Any] = Field(default_factory=dict)


@pytest.fixture
def plugins() -> PluginManager:
    here = f"{__name__}:ShopOptions"

    def one(entry: Any) -> Any:
        @hookimpl
        def hook() -> Iterator[Any]:
            yield entry

        return hook

    manager = PluginManager()
    manager.register(
        SimpleNamespace(
            vime_launchers=one(LauncherEntry("inline", "L.", "json:loads")),
            vime_trainers=one(TrainerBackend("megatron", "T.", "json:loads", here)),
            vime_rollouts=one(RolloutEngine("vllm", "R.", "json:loads", here)),
            vime_model_sources=one(ModelSource("directory", "M.", "json:loads", here)),
            vime_datasets=hookimpl(specname=None)(
                lambda: [DatasetSource("jsonl", "D.", "json:loads", here), DatasetSource("sql", "D.", "x:y")]
            ),
            vime_rewards=one(Reward("exact", "E.", "json:loads")),
            vime_advantage_estimators=one(AdvantageEstimator("grpo", "G.", "json:loads")),
            vime_losses=one(Loss("ppo-clip", "P.", "json:loads")),
        ),
        PluginInfo("fixture", "fixture-dist", "1"),
    )
    # The class is found by import path, so it must be the one of the imported module.
    return manager


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or SimpleNamespace(ShopOptions=ShopOptions))


def minimal(**sections: Any) -> dict[str, Any]:
    return overlay({"run": {}, "model": {}, "data": {"source": "jsonl"}, "reward": {"name": "exact"}}, sections)


def refuse(raw: dict[str, Any], plugins: PluginManager) -> VimeError:
    with pytest.raises(VimeError) as caught:
        validate(raw, plugins)
    return caught.value


def test_an_unknown_launcher_is_named_with_the_nearest(plugins: PluginManager) -> None:
    with pytest.raises(PluginError, match=r"run\.launcher = 'inlime'.*\n.*'inline'"):
        validate(minimal(run={"launcher": "inlime"}), plugins)


def test_a_plugin_types_its_own_section(plugins: PluginManager) -> None:
    config = validate(minimal(data={"jsonl": {"size": 5}}), plugins)
    assert config.options("data", "jsonl") == ShopOptions(size=5)
    assert config.options("trainer", "megatron") == ShopOptions()


def test_an_unknown_key_is_answered_with_the_nearest(plugins: PluginManager) -> None:
    error = refuse(minimal(sampling={"max_tokenz": 3}), plugins)
    assert error.message == "unknown key sampling.max_tokenz"
    assert "Did you mean sampling.max_tokens?" in error.remedy


def test_an_unknown_key_of_a_plugin_is_answered_likewise(plugins: PluginManager) -> None:
    error = refuse(minimal(data={"jsonl": {"sise": 5}}), plugins)
    assert error.message == "unknown key data.jsonl.sise"
    assert "Did you mean data.jsonl.size?" in error.remedy


def test_an_unknown_section_is_an_error(plugins: PluginManager) -> None:
    assert "Did you mean sampling?" in refuse(minimal(samplin={"max_tokens": 3}), plugins).remedy


def test_a_wrong_type_names_key_and_value(plugins: PluginManager) -> None:
    error = refuse(minimal(trainer={"lr": "fast"}), plugins)
    assert error.message.startswith("trainer.lr = 'fast': ")
    assert "--set trainer.lr=VALUE" in error.remedy


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_a_learning_rate_is_finite_and_not_negative(value: float, plugins: PluginManager) -> None:
    assert refuse(minimal(trainer={"lr": value}), plugins).message.startswith("trainer.lr = ")


def test_more_engines_than_any_cluster_has_are_refused(plugins: PluginManager) -> None:
    assert validate(minimal(rollout={"engines": 65536}), plugins).rollout.engines == 65536
    assert refuse(minimal(rollout={"engines": 65537}), plugins).message.startswith("rollout.engines = 65537: ")


def test_a_missing_key_is_named(plugins: PluginManager) -> None:
    raw = minimal()
    del raw["reward"]["name"]
    assert refuse(raw, plugins).message == "reward.name is required but not set"


def test_a_table_that_an_overlay_leaves_behind_is_checked_and_left_out(plugins: PluginManager) -> None:
    config = validate(minimal(data={"sql": {}, "jsonl": {"size": 2}}), plugins)
    assert list(config.data.plugin_options) == ["jsonl"]
    assert "sql" not in resolved_table(config)["data"]
    assert refuse(minimal(data={"sql": {"tabel": "t"}}), plugins).message == "unknown key data.sql.tabel"


def test_the_private_field_cannot_be_set_from_a_file(plugins: PluginManager) -> None:
    config = validate(minimal(data={"jsonl": {"size": 5}}), plugins)
    error = refuse(minimal(sampling={"plugin_options": {}}), plugins)
    assert "unknown key" in error.message
    assert config.options("data", "jsonl") == ShopOptions(size=5)


def test_contradictions_between_keys_name_both(plugins: PluginManager) -> None:
    message = refuse(minimal(sampling={"max_tokens": 64}, rollout={"context_length": 64}), plugins).message
    assert "sampling.max_tokens = 64" in message
    assert "rollout.context_length = 64" in message
    message = refuse(minimal(algorithm={"updates_per_rollout": 2}), plugins).message
    assert "algorithm.updates_per_rollout = 2" in message


def test_a_resolved_table_reads_back_to_the_same_configuration(plugins: PluginManager) -> None:
    config = validate(minimal(data={"jsonl": {"size": 5}}, trainer={"lr": 2e-6}), plugins)
    text = tomlkit.dumps(resolved_table(config))
    assert validate(tomlkit.parse(text).unwrap(), plugins) == config


def test_files_overlay_left_to_right_and_overrides_come_last(tmp_path: Path) -> None:
    base, top = tmp_path / "base.toml", tmp_path / "top.toml"
    base.write_text(
        '[run]\nseed = 1\n[model]\nsource = "random-qwen2"\n[data]\nsource = "reasoning-gym"\n'
        '[data.reasoning-gym]\ntask = "chain_sum"\n[reward]\nname = "exact"\n'
    )
    top.write_text("[run]\nseed = 2\nsteps = 4\n")
    config, _ = load_config([base, top], ["run.steps=9", "run.name=mine"])
    assert (config.run.seed, config.run.steps, config.run.name) == (2, 9, "mine")


@pytest.mark.parametrize(
    ("text", "code"),
    [("nothing = = 3", "VIME-CONFIG-002"), ("[trainer]\nlearning_rate = 1.0", "VIME-CONFIG-005")],
)
def test_a_bad_file_is_refused(text: str, code: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config([file])
    assert caught.value.code == code


def test_a_renamed_key_says_the_name_here(tmp_path: Path) -> None:
    file = tmp_path / "old.toml"
    file.write_text("[trainer]\nlearning_rate = 1.0\n")
    with pytest.raises(ConfigError, match=r"trainer\.learning_rate is called trainer.lr here"):
        load_config([file])


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read configuration '.*absent.toml'"):
        load_config([tmp_path / "absent.toml"])


@pytest.mark.parametrize(("text", "value"), [("1e-6", 1e-6), ("true", True), ("abc", "abc"), ("[1, 2]", [1, 2])])
def test_an_override_is_a_toml_value_or_a_string(text: str, value: object) -> None:
    assert parse_override(f"a.b={text}") == {"a": {"b": value}}


@pytest.mark.parametrize("text", ["a.b", "=3", "a..b=3"])
def test_an_override_of_the_wrong_form_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not of the form"):
        parse_override(text)


TABLES = st.recursive(
    st.dictionaries(st.sampled_from("abc"), st.integers()),
    lambda inner: st.dictionaries(st.sampled_from("abc"), st.one_of(st.integers(), inner)),
    max_leaves=8,
)


def leaves(table: Any, prefix: tuple[str, ...] = ()) -> dict[tuple[str, ...], int]:
    found: dict[tuple[str, ...], int] = {}
    for key, value in table.items():
        found |= leaves(value, (*prefix, key)) if isinstance(value, dict) else {(*prefix, key): value}
    return found


@given(TABLES, TABLES)
def test_the_right_file_wins_leaf_by_leaf(base: Any, top: Any) -> None:
    before = repr((base, top))
    merged = leaves(overlay(base, top))
    assert leaves(top).items() <= merged.items()
    untouched = {path: v for path, v in leaves(base).items() if path[0] not in top}
    assert untouched.items() <= merged.items()
    assert repr((base, top)) == before


def test_an_unknown_plugin_is_named_with_its_key(plugins: PluginManager) -> None:
    error = refuse(minimal(data={"source": "jsonk"}), plugins)
    assert isinstance(error, PluginError)
    assert "data.source = 'jsonk'" in error.message


def test_the_schema_is_frozen(plugins: PluginManager) -> None:
    config = validate(minimal(), plugins)
    with pytest.raises(Exception, match="frozen"):
        config.run.seed = 3  # type: ignore[misc]
    assert isinstance(config, RunConfig)


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"run": {"steps": True}}, "run.steps = True"),
        ({"run": {"seed": "3"}}, "run.seed = '3'"),
        ({"trainer": {"lr": True}}, "trainer.lr = True"),
        ({"run": {"name": 3}}, "run.name = 3"),
        ({"data": {"jsonl": {"size": True}}}, "data.jsonl.size = True"),
        ({"run": {"sinks": "console"}}, "run.sinks = 'console': input should be a valid array"),
    ],
)
def test_a_value_of_another_type_is_not_converted(sections: Any, key: str, plugins: PluginManager) -> None:
    assert refuse(minimal(**sections), plugins).message.startswith(key)


def test_remedies_fit_what_is_missing(plugins: PluginManager) -> None:
    raw = minimal()
    del raw["run"]
    assert "Write a table [run]" in refuse(raw, plugins).remedy
    assert "run.sinks=[" in refuse(minimal(run={"sinks": "console"}), plugins).remedy
    assert "Write trainer as a table" in refuse({**minimal(), "trainer": 3}, plugins).remedy


def test_the_table_of_a_plugin_is_answered_with_the_nearest(plugins: PluginManager) -> None:
    error = refuse(minimal(trainer={"megatrom": {}}), plugins)
    assert error.message == "unknown key trainer.megatrom"
    assert "Did you mean trainer.megatron?" in error.remedy


@pytest.mark.parametrize("section", ["trainer", "model", "sampling"])
def test_plugin_options_is_no_key(section: str, plugins: PluginManager) -> None:
    error = refuse(minimal(**{section: {"plugin_options": {"megatron": {}}}}), plugins)
    assert error.message == f"unknown key {section}.plugin_options"


def test_a_configuration_cannot_be_changed_in_any_depth(plugins: PluginManager) -> None:
    config = validate(minimal(data={"jsonl": {"extra": {"list": [1, {"deep": 2}]}}}), plugins)
    options: Any = config.options("data", "jsonl")
    with pytest.raises(TypeError, match="frozen"):
        options.extra["new"] = 1
    with pytest.raises(TypeError, match="frozen"):
        options.extra["list"][1]["deep"] = 3
    with pytest.raises(TypeError, match="frozen"):
        config.data.plugin_options.clear()  # type: ignore[attr-defined]
    assert thaw(options.extra) == {"list": [1, {"deep": 2}]}
    assert resolved_table(config)["data"]["jsonl"]["extra"] == {"list": [1, {"deep": 2}]}


@pytest.mark.parametrize(
    ("sections", "parts"),
    [
        (
            {"algorithm": {"updates_per_rollout": 9, "old_log_probs": "recompute"}},
            ["algorithm.updates_per_rollout = 9", "sampling.prompts_per_step = 8"],
        ),
        (
            {"algorithm": {"old_log_probs": "rollout"}, "sampling": {"top_k": 5}},
            ["algorithm.old_log_probs = 'rollout'", "sampling.top_k = 5"],
        ),
        ({"algorithm": {"old_log_probs": "rollout"}, "sampling": {"top_p": 0.5}}, ["sampling.top_p = 0.5"]),
        (
            {"evaluation": {"every": 1, "max_tokens": 1024}},
            ["evaluation.max_tokens = 1024", "rollout.context_length = 1024"],
        ),
        ({"run": {"output": ""}}, ["run.output: the path is empty"]),
        ({"run": {"cache": ""}}, ["run.cache: the path is empty"]),
        ({"run": {"output": "a\0b"}}, ["run.output: the path 'a\\x00b' holds a NUL byte"]),
        ({"run": {"output": "~nobody-of-this-name/x"}}, ["run.output: the path", "unknown user"]),
    ],
)
def test_what_cannot_work_is_refused_with_its_keys(sections: Any, parts: list[str], plugins: PluginManager) -> None:
    message = refuse(minimal(**sections), plugins).message
    assert [part for part in parts if part not in message] == [], message


def test_the_home_directory_is_expanded(plugins: PluginManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    assert validate(minimal(run={"output": "~/runs/a"}), plugins).run.output == Path("/somewhere/runs/a")
    assert JsonlOptions.model_validate({"path": "~/questions.jsonl"}).path == Path("/somewhere/questions.jsonl")


def test_a_date_is_refused_by_name(plugins: PluginManager) -> None:
    import datetime

    assert "2020-01-02" in refuse(minimal(run={"name": datetime.date(2020, 1, 2)}), plugins).message


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/full", "x" * 300, "."])
def test_what_is_no_file_is_no_configuration(path: str) -> None:
    with pytest.raises(ConfigError, match="cannot read configuration"):
        load_config([Path(path)])


def test_a_table_given_last_needs_no_quoting() -> None:
    smoke = Path(__file__).parents[4] / "configs" / "smoke.toml"
    config, _ = load_config([smoke], ["run.output=other"], {"run": {"output": "a\"b'c\\d"}})
    assert str(config.run.output) == "a\"b'c\\d"


@pytest.mark.parametrize("given", ["run=3", 'run="x"', "run=[]", "sampling=3", "trainer=1", "plugins=false"])
def test_a_section_is_a_table_in_every_layer(given: str, tmp_path: Path) -> None:
    smoke = Path(__file__).parents[4] / "configs" / "smoke.toml"
    section, _, value = given.partition("=")
    (tmp_path / "flat.toml").write_text(f"{section} = {value}\n")
    for files, sets in (([smoke], [given, f"{section}.x=1"]), ([tmp_path / "flat.toml", smoke], [])):
        with pytest.raises(ConfigError, match=rf"{section} = .*: input should be a table") as caught:
            load_config(files, sets, {"run": {"output": "a"}})
        assert f"Write {section} as a table: [{section}]" in caught.value.remedy


def test_a_table_within_a_section_is_called_so(plugins: PluginManager) -> None:
    error = refuse(minimal(data={"jsonl": {"extra": 3}}), plugins)
    assert error.message == "data.jsonl.extra = 3: input should be a table"


def test_a_key_that_stands_twice_is_answered_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "twice.toml"
    file.write_text("[run]\nsteps = 1\nsteps = 2")
    with pytest.raises(ConfigError, match="at line 3, column"):
        load_config([file])


def test_a_record_is_no_configuration(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(ConfigError) as caught:
        load_config([tmp_path])
    assert "That is a run record" in caught.value.remedy


def test_who_misses_a_plugin_hears_what_leaves_plugins_out() -> None:
    smoke = Path(__file__).parents[4] / "configs" / "smoke.toml"
    for override, said in (
        ("plugins.disable=['core']", "disable = ['core']"),
        ("plugins.allow=['vllm']", "allow = ['vllm']"),
    ):
        with pytest.raises(PluginError, match="no such") as caught:
            load_config([smoke], [override])
        assert f"plugins.{said} leaves" in caught.value.remedy


def test_a_file_whose_path_is_no_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / os.fsdecode(b"c\xff.toml")
    file.write_text("[run]\n")
    with pytest.raises(ConfigError, match="its path is no UTF-8") as caught:
        load_config([file])
    assert caught.value.code == "VIME-CONFIG-001"


UNREADABLE = os.fsdecode(b"a\xff b")


@pytest.mark.parametrize(
    ("key", "table"),
    [
        ("run.output", {"run": {"output": UNREADABLE}}),
        ("run.sinks", {"run": {"sinks": ["jsonl", UNREADABLE]}}),
        ("plugins.modules", {"plugins": {"modules": [UNREADABLE]}}),
        ("model.random-qwen2.seed", {"model": {"source": "random-qwen2", "random-qwen2": {"seed": UNREADABLE}}}),
    ],
)
def test_bytes_that_are_no_text_are_refused_by_key(key: str, table: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{key} = .*no UTF-8") as caught:
        load_config([], [], table)
    assert caught.value.code == "VIME-CONFIG-007"
    str(caught.value).encode()
