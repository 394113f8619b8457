"""Twenty steps under a contract, with top-p and top-k: the log-probs of training and rollout never part."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import ROOT, no_traceback, vime

from vime_core.record.reader import RunRecord

pytestmark = [pytest.mark.slow, pytest.mark.engine]

STEPS = 20


def test_every_step_of_a_run_is_aligned(tmp_path: Path) -> None:
    record = tmp_path / "record"
    sets = (f"run.steps={STEPS}", "sampling.top_p=0.9", "sampling.top_k=40", "algorithm.old_log_probs='rollout'")
    options = [option for one in sets for option in ("--set", one)]
    ran = vime("run", ROOT / "configs" / "aligned-smoke.toml", "--output", record, *options, timeout=900)
    no_traceback(ran)
    assert ran.code == 0, ran.text
    lines = [json.loads(line) for line in (record / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == STEPS
    assert [line["train_rollout_logprob_abs_diff"] for line in lines] == [0.0] * STEPS
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
    ran = vime("run", ROOT / "configs" / "aligned-smoke.toml", "--output", record, *options, timeout=300)
    no_traceback(ran)
    assert ran.code == 1, ran.text
    assert "VIME-ALIGN-005: contract dense/v1 does not hold in step 1" in ran.text
    assert "first in sample (6, 0)" in ran.text
