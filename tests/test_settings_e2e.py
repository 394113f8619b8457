"""One run with what the smoke run leaves at its default: several updates, fp32, evaluation, other choices."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from command import vime

pytestmark = [pytest.mark.slow, pytest.mark.engine]
ROOT = Path(__file__).resolve().parent.parent

SETTINGS = """
[algorithm]
advantage = "rloo"
reduction = "sample"
updates_per_rollout = 2
old_log_probs = "recompute"

[algorithm.ppo-clip]
clip_high = 0.28

[trainer]
dtype = "fp32"
lr = 1e-4
warmup_steps = 2

[evaluation]
every = 1
prompts = 3
max_tokens = 8

[sampling]
temperature = 0.7
top_p = 0.9
"""


@pytest.fixture(scope="module")
def record(smoke: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("settings")
    overlay = directory / "settings.toml"
    overlay.write_text(SETTINGS)
    ran = vime("run", smoke, overlay, "--output", directory / "record", "--json")
    assert ran.code == 0, ran.text
    assert ran.json["steps"] == 2
    return directory / "record"


def steps(record: Path) -> list[dict]:
    return [json.loads(line) for line in (record / "steps.jsonl").read_text().splitlines()]


def metrics(record: Path) -> list[dict]:
    return [json.loads(line) for line in (record / "metrics.jsonl").read_text().splitlines()]


def test_every_metric_is_explained(record: Path) -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall("`([^`]+)`", row)}
    shown = {name for step in metrics(record) for name in step} - {"step"}
    assert len(shown) > 25
    assert shown - named == set()


def test_each_rollout_step_holds_its_optimizer_steps(record: Path) -> None:
    for step in steps(record):
        assert [update["samples"] for update in step["updates"]] == [8, 8]
        assert step["updates"][0]["gradients_root"] != step["updates"][1]["gradients_root"]
    rates = [float.fromhex(update["learning_rate"]) for step in steps(record) for update in step["updates"]]
    assert rates == sorted(rates)
    assert rates[0] < rates[-1] == 1e-4


def test_the_record_is_whole_and_the_ratio_starts_at_one(record: Path) -> None:
    from vime_core.record.reader import RunRecord

    assert RunRecord.open(record).check().findings == ()
    assert metrics(record)[0]["train/ratio"] == pytest.approx(1.0, abs=0.2)


def test_evaluation_comes_before_each_step(record: Path) -> None:
    for line in metrics(record):
        assert 0.0 <= line["evaluation/reward"] <= 1.0
        assert 0 < line["evaluation/response_length"] <= 8


def test_the_mismatch_is_measured(record: Path) -> None:
    for line in metrics(record):
        assert 0.0 <= line["train_rollout_logprob_abs_diff"] < 10.0
        assert line["train_rollout_logprob_abs_diff/max"] >= line["train_rollout_logprob_abs_diff"]
