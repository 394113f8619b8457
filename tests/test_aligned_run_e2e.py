"""Twenty steps under a contract, with top-p and top-k: the log-probs of training and rollout never part."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import ROOT, no_traceback, vime

from vime_core.loop.metrics import ABS_DIFF
from vime_core.record.reader import RunRecord

pytestmark = [pytest.mark.slow, pytest.mark.engine]

STEPS = 20
EVALUATION = ["evaluation.every=10", "evaluation.prompts=3", "evaluation.max_tokens=8"]


def test_every_step_of_a_run_is_aligned(tmp_path: Path) -> None:
    record = tmp_path / "record"
    sets = [f"run.steps={STEPS}", "sampling.top_p=0.9", "sampling.top_k=40", "algorithm.old_log_probs='rollout'"]
    sets += EVALUATION
    options = [option for one in sets for option in ("--set", one)]
    ran = vime("run", ROOT / "configs" / "aligned-smoke.toml", "--output", record, *options)
    no_traceback(ran)
    assert ran.code == 0, ran.text
    lines = [json.loads(line) for line in (record / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == STEPS
    assert [line["train_rollout_logprob_abs_diff"] for line in lines] == [0.0] * STEPS
    scored = [line[f"evaluation/{ABS_DIFF}"] for line in lines if f"evaluation/{ABS_DIFF}" in line]
    assert scored == [0.0] * (STEPS // 10)
    samples = [sample for step in range(STEPS) for sample in RunRecord.open(record).step_samples(step).samples]
    counts = [count for sample in samples for count in sample.kept.counts]
    assert len(counts) == sum(len(sample.response_tokens) for sample in samples)
    assert max(counts) <= 40
    assert min(counts) >= 1
    assert len(set(counts)) > 5


def test_samples_of_later_optimizer_steps_are_compared_too(tmp_path: Path) -> None:
    sets = (
        "algorithm.updates_per_rollout=2",
        "algorithm.old_log_probs='recompute'",
        "plugins.modules=['wrong_second_half']",
    )
    options = [option for one in sets for option in ("--set", one)]
    record = tmp_path / "record"
    ran = vime("run", ROOT / "configs" / "aligned-smoke.toml", "--output", record, *options)
    no_traceback(ran)
    assert ran.code == 1, ran.text
    assert "VIME-ALIGN-005: contract dense/v1 does not hold in step 1" in ran.text
    assert "first in sample (6, 0)" in ran.text


@pytest.mark.parametrize(
    ("fault", "words"),
    [("scores", "log-probs differ, first in sample (0, 0)"), ("choice", "the trainer draws")],
)
def test_evaluations_are_held_to_the_contract_too(
    fault: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VIME_TEST_FAULT", fault)
    sets = [*EVALUATION[1:], "evaluation.every=1", "plugins.modules=['wrong_evaluation']"]
    options = [option for one in sets for option in ("--set", one)]
    ran = vime("run", ROOT / "configs" / "aligned-smoke.toml", "--output", tmp_path / "record", *options)
    no_traceback(ran)
    assert ran.code == 1, ran.text
    assert "contract dense/v1 does not hold in the evaluation before step 1" in ran.text
    assert words in ran.text
