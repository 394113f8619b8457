"""Several evaluation sets by name in one run, and what their configuration may not say."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import bigram
import pytest
from command import ROOT, vime

from vime_core.config.load import load_config
from vime_core.config.validate import resolved_table, validate
from vime_core.errors import DataError, PluginError, VimeError
from vime_core.loop.preparation import Preparation
from vime_core.loop.sides import load_policy
from vime_core.loop.streams import evaluation_streams, training_stream
from vime_core.record.reader import RunRecord
from vime_core.rl.seeds import sample_seed

pytestmark = pytest.mark.slow

SETS = """
[evaluation]
every = 2
prompts = 3
max_tokens = 6

[evaluation.sets.sums]
source = "reasoning-gym"
reasoning-gym = { task = "chain_sum", seed = 9, size = 16 }

[evaluation.sets.file]
source = "jsonl"
prompts = 2
max_tokens = 4
temperature = 0.5
jsonl.path = "FILE"
"""


@pytest.fixture(scope="module")
def overlay(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("sets")
    rows = [{"question": f"{n} + {n}", "answer": f"#### {2 * n}"} for n in range(5)]
    (place / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (place / "sets.toml").write_text(SETS.replace("FILE", str(place / "rows.jsonl")))
    return place / "sets.toml"


def loaded(overlay: Path, *sets: str) -> Any:
    return load_config([ROOT / "configs" / "smoke.toml", overlay], [*bigram.OVERRIDES, *sets])


@pytest.fixture(scope="module")
def record(overlay: Path) -> RunRecord:
    place = overlay.with_name("run")
    settings = [*bigram.OVERRIDES, "run.steps=3", f"run.output='{place}'", f"run.cache='{overlay.parent}'"]
    ran = vime("run", "configs/smoke.toml", overlay, *(part for one in settings for part in ("--set", one)))
    assert ran.code == 0, ran.text
    return RunRecord.open(place)


def test_each_set_has_its_own_settings_and_metrics(record: RunRecord) -> None:
    assert record.check().findings == ()
    for step in (0, 2):
        samples = record.evaluation_samples(step)
        assert [sample.prompt_index for sample in samples] == [0, 1, 2, 3, 4]
        assert all(len(one.response_tokens) <= limit for one, limit in zip(samples, (6, 6, 6, 4, 4), strict=True))
        metrics = {name: float.fromhex(value) for name, value in record.steps[step].metrics.items()}
        for name, part in (("sums", samples[:3]), ("file", samples[3:])):
            mean = sum(sample.reward for sample in part) / len(part)
            assert metrics[f"evaluation/{name}/reward"] == pytest.approx(mean)
            length = sum(len(sample.response_tokens) for sample in part) / len(part)
            assert metrics[f"evaluation/{name}/response_length"] == length
        assert "evaluation/reward" not in metrics
    assert not any(name.startswith("evaluation/") for name in record.steps[1].metrics)


def test_a_set_is_sampled_the_same_whatever_stands_before_it(record: RunRecord) -> None:
    seeds = [sample.seed for sample in record.evaluation_samples(0)]
    assert seeds == [sample_seed(7, -1, n, 0) for n in range(3)] + [sample_seed(7, -2, n, 0) for n in range(2)]
    assert seeds == [sample.seed for sample in record.evaluation_samples(2)]


def test_the_resolved_configuration_reads_back(overlay: Path) -> None:
    config, plugins = loaded(overlay)
    assert validate(json.loads(json.dumps(resolved_table(config))), plugins) == config
    assert resolved_table(config)["evaluation"]["sets"]["sums"]["reasoning-gym"]["size"] == 16


@pytest.mark.parametrize(
    ("setting", "parts"),
    [
        ("evaluation.sets.sums.promts=3", ["unknown key evaluation.sets.sums.promts", "prompts"]),
        ("evaluation.sets.sums.source=jsnl", ["evaluation.sets.sums.source", "jsnl"]),
        ("evaluation.sets.sums.reasoning-gym.sze=3", ["evaluation.sets.sums.reasoning-gym.sze", "size"]),
        ("evaluation.sets.sums.jsonl.pth=3", ["evaluation.sets.sums.jsonl"]),
        ("evaluation.sets.more.prompts=3", ["evaluation.sets.more.source is required"]),
        (
            "evaluation.sets.sums.max_tokens=256",
            ["evaluation.sets.sums.max_tokens = 256", "rollout.context_length = 256"],
        ),
        ("evaluation.sets.sums.plugin_options={}", ["unknown key evaluation.sets.sums.plugin_options"]),
        ("evaluation.sets.sums=3", ["evaluation.sets.sums", "table"]),
        ("evaluation.sets=3", ["evaluation.sets"]),
    ],
)
def test_a_wrong_set_is_named(setting: str, parts: list[str], overlay: Path) -> None:
    with pytest.raises(VimeError) as caught:
        loaded(overlay, setting)
    said = f"{caught.value.message} {caught.value.remedy}"
    assert [part for part in parts if part not in said] == [], said


def test_a_set_whose_prompts_do_not_fit_is_named(overlay: Path, tmp_path: Path) -> None:
    settings = [*bigram.OVERRIDES, "evaluation.sets.file.max_tokens=250", f"run.output='{tmp_path / 'run'}'"]
    ran = vime("run", "configs/smoke.toml", overlay, *(part for one in settings for part in ("--set", one)))
    assert ran.code == 2
    assert "evaluation.sets.file.max_tokens" in ran.text


NOWHERE = "/nowhere/rows.jsonl"
NO_TOKENIZER: Any = None


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ("evaluation={source='jsonl', jsonl={path='FILE'}}", "evaluation.jsonl.path"),
        ("evaluation.sets.sums={source='jsonl', jsonl={path='FILE'}}", "evaluation.sets.sums.jsonl.path"),
        ("data={source='jsonl', jsonl={path='FILE'}}", "data.jsonl.path"),
        ("data={source='mixture', mixture={sources=[{path='FILE'}]}}", "data.mixture.sources.0.path"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_by_its_key(setting: str, key: str, overlay: Path) -> None:
    config, plugins = loaded(overlay, setting.replace("FILE", NOWHERE))
    streams = training_stream if key.startswith("data") else evaluation_streams
    with pytest.raises(DataError, match=re.escape(f"{key}: cannot read dataset '{NOWHERE}'")):
        streams(config, plugins, NO_TOKENIZER)


def test_an_absent_sink_is_named_with_its_key(overlay: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.delitem(sys.modules, "vime_core.sinks.wandb", raising=False)
    config, plugins = loaded(overlay, "run.sinks=['wandb']")
    with pytest.raises(PluginError, match=r"run\.sinks: plugin 'wandb' needs 'wandb'") as caught:
        _ = Preparation(config, load_policy(config, plugins), plugins).sinks
    assert "pip install 'vime-core[wandb]'" in caught.value.remedy
