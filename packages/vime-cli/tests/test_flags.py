"""The field's switches: what each becomes, and that nothing unknown is passed over."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vime_cli.flags import overrides_of, pairs, refuse_another_policy
from vime_cli.main import main
from vime_core.config.layers import parse_override
from vime_core.config.load import load_config
from vime_core.errors import ConfigError

KEYS = {"attention_backend", "max_num_seqs"}
ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("arguments", "overrides"),
    [
        (["--deterministic-mode"], ["run.policy=reproducible"]),
        (["--vllm-enable-deterministic-inference"], ["run.policy=reproducible"]),
        (["--freeze-indexer"], ["trainer.megatron.freeze_indexer=true"]),
        (["--vllm-attention-backend", "FLASH_ATTN"], ["rollout.vllm.attention_backend=FLASH_ATTN"]),
        (["--vllm-max-num-seqs=8"], ["rollout.vllm.max_num_seqs=8"]),
        (["--vllm-swap-space", "4"], ["rollout.vllm.engine_args.swap_space=4"]),
        (
            ["--vllm-enable-x", "--vllm-max-num-seqs", "8"],
            ["rollout.vllm.engine_args.enable_x=true", "rollout.vllm.max_num_seqs=8"],
        ),
    ],
)
def test_a_switch_becomes_a_key(arguments: list[str], overrides: list[str]) -> None:
    assert overrides_of(arguments, KEYS) == overrides


@pytest.mark.parametrize("arguments", [["--lr", "1"], ["--deterministic-mode", "yes"], ["--vllm"]])
def test_what_is_no_switch_is_refused(arguments: list[str]) -> None:
    with pytest.raises(ConfigError, match=f"no option {arguments[0]}"):
        overrides_of(arguments, KEYS)


def test_a_word_without_an_option_is_refused_for_the_command_that_was_called() -> None:
    with pytest.raises(ConfigError, match=r"vime run takes no word 'config\.toml' there"):
        overrides_of(["config.toml"], KEYS)
    with pytest.raises(ConfigError, match="vime convert hf-to-torch-dist takes no word 'more' there"):
        dict(pairs(["--num-layers", "2", "more"], "vime convert hf-to-torch-dist"))


def test_a_runtime_environment_is_variables_of_the_actors() -> None:
    text = json.dumps({"env_vars": {"A": "1", "QUOTED": 'a"b\\c'}})
    (override,) = overrides_of(["--runtime-env-json", text], KEYS)
    table = parse_override(override)
    assert table == {"run": {"ray": {"env_vars": {"A": "1", "QUOTED": 'a"b\\c'}}}}
    assert overrides_of([f"--runtime-env-json={text}"], KEYS) == [override]
    smoke = ROOT / "configs" / "smoke.toml"
    ray = load_config([smoke], ["run.launcher=ray", override])[0].options("run", "ray").model_dump()
    assert ray["env_vars"] == {"A": "1", "QUOTED": 'a"b\\c'}
    with pytest.raises(ConfigError, match=r"env_vars would change nothing: run\.launcher = 'inline', not 'ray'"):
        load_config([smoke], [override])


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"": "1"}, "'' is no name of an environment variable"),
        ({"A=B": "1"}, "'A=B' is no name"),
        ({"A\0": "1"}, r"'A\\x00' is no name"),
        ({"A": "1\0"}, r"'1\\x00' holds a NUL byte"),
    ],
)
def test_what_no_environment_can_hold_is_refused(variables: dict[str, str], says: str) -> None:
    (override,) = overrides_of(["--runtime-env-json", json.dumps({"env_vars": variables})], KEYS)
    with pytest.raises(ConfigError, match=says):
        load_config([ROOT / "configs" / "smoke.toml"], ["run.launcher=ray", override])


@pytest.mark.parametrize("value", ["\x7f", "\n", "\\", '"', "é", "😀"])
def test_any_other_character_arrives(value: str) -> None:
    (override,) = overrides_of(["--runtime-env-json", json.dumps({"env_vars": {"A": value}})], KEYS)
    assert parse_override(override)["run"]["ray"]["env_vars"] == {"A": value}


@pytest.mark.parametrize("switch", ["--deterministic-mode", "--vllm-enable-deterministic-inference"])
def test_determinism_beside_another_policy_is_refused(switch: str, tmp_path: Path) -> None:
    switches = overrides_of([switch], KEYS)
    file = tmp_path / "off.toml"
    file.write_text("[run]\npolicy = 'off'\n")
    for files, overrides in (([file], list[str]()), (list[Path](), ["run.policy=off"])):
        with pytest.raises(ConfigError, match=r"asks for run\.policy = 'reproducible', and run\.policy = 'off'"):
            refuse_another_policy(switches, files, overrides)
        refuse_another_policy([], files, overrides)
    refuse_another_policy(switches, [ROOT / "configs" / "smoke.toml"], ["run.policy=reproducible"])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "no JSON"),
        ('{"working_dir": "."}', "only an object with the key env_vars"),
        ("[]", "only an object"),
        ('{"env_vars": {"A": "\\ud800"}}', "half of a surrogate pair"),
        ('{"env_vars": {"A": 1}}', "an object of strings"),
    ],
)
def test_another_runtime_environment_is_refused(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        overrides_of(["--runtime-env-json", text], KEYS)


def test_vime_run_takes_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = [
        "run",
        str(ROOT / "configs" / "smoke.toml"),
        "--dry-run",
        "--json",
        "--output",
        str(tmp_path / "record"),
    ]
    switches = [
        "--deterministic-mode",
        "--vllm-max-num-seqs",
        "8",
        "--vllm-block-size",
        "16",
    ]
    monkeypatch.setattr("sys.argv", ["vime", *arguments, "--set", f"run.cache='{tmp_path}'", *switches])
    assert main() == 0
    table = json.loads(capsys.readouterr().out)
    assert table["run"]["policy"] == "reproducible"
    assert table["rollout"]["vllm"]["max_num_seqs"] == 8
    assert table["rollout"]["vllm"]["engine_args"] == {"block_size": 16}
