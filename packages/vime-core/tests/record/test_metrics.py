"""A metric that what is stored does not give is found, in every place where one is told."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from synthetic import Step, change_step, make_run, with_evaluation, write_run

from vime_core.loop.evaluation import evaluation_metrics
from vime_core.loop.metrics import step_metrics
from vime_core.loop.timing import PhaseTimer
from vime_core.record.metrics import by_set, recomputed
from vime_core.record.reader import RunRecord
from vime_core.record.seal import write_seal
from vime_core.types import TrainStepResult

TIMER = PhaseTimer()
TIMER.seconds["generate"] = 1.0


def told(step: Step) -> dict[str, float]:
    """What a run writes of such a step, as far as it is a function of it."""
    results = [TrainStepResult(u.loss, u.grad_norm, u.learning_rate, (), {"ratio": 1.5}) for u in step.updates]
    metrics = step_metrics(step.samples, step.train_log_probs, results, TIMER)
    metrics |= evaluation_metrics({"": step.evaluation} if step.evaluation else {})
    return {name: value for name, value in metrics.items() if not name.startswith("time/")}


def run() -> list[Step]:
    steps = with_evaluation(make_run(2, updates=2), 1)
    samples = list(steps[1].samples)
    samples[2] = replace(samples[2], response_tokens=samples[3].response_tokens[: len(samples[2].response_tokens)])
    samples[0] = replace(samples[0], prompt_tokens=samples[2].prompt_tokens)
    samples[1] = replace(samples[1], prompt_tokens=samples[2].prompt_tokens)
    steps = change_step(steps, 1, samples=tuple(samples))
    return [replace(step, metrics=told(step)) for step in steps]


NAMES = sorted(name for name in told(run()[1]) if name != "train/ratio")


def test_what_a_run_writes_is_what_its_record_gives(tmp_path: Path) -> None:
    record = write_run(tmp_path / "run", run())
    assert record.check().findings == ()
    assert len(NAMES) == 20
    assert set(NAMES) <= set(record.steps[1].metrics)


def test_nan_counts_as_unequal(tmp_path: Path) -> None:
    """No run writes it, since a trainer that gives NaN ends one; an edited record may hold it."""
    (step,) = make_run(1)
    rows = [sample.rollout_log_probs.copy() for sample in step.samples]
    rows[1][0] = math.nan
    record = write_run(tmp_path / "run", [replace(step, train_log_probs=tuple(rows))])
    found = recomputed(record.steps[0], record.step_samples(0), {})
    assert found["train_rollout_logprob_abs_diff/unequal"] == 1 / sum(map(len, rows))


@pytest.mark.parametrize("name", NAMES)
def test_a_number_one_ulp_off_is_found(name: str, tmp_path: Path) -> None:
    steps = run()
    wrong = math.nextafter(steps[1].metrics[name], math.inf)
    record = write_run(tmp_path / "run", change_step(steps, 1, metrics={**steps[1].metrics, name: wrong}))
    (finding,) = record.check().findings
    assert finding.startswith(f"step 1: metric {name} is {wrong.hex()}, and what is stored gives ")


@pytest.mark.parametrize(
    ("line", "finding"),
    [
        ({"step": 1, "reward/mean": 0.5, "train/loss": 0.25}, "train/loss of step 1 is 0.25, and steps.jsonl says "),
        ({"step": 0, "reward/mean": "high"}, "reward/mean of step 0 is high, and"),
        ({"step": 1, "train/loss": 0.125, "time/step": 3.0}, ""),
        ([1, 2], "line 1 is no JSON object"),
    ],
)
def test_the_numbers_for_people_are_those_of_the_record(line: Any, finding: str, tmp_path: Path) -> None:
    write_run(tmp_path / "run", run())
    (tmp_path / "run" / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    write_seal(tmp_path / "run", (tmp_path / "run" / "manifest.json").read_bytes())
    findings = RunRecord.open(tmp_path / "run").check().findings
    assert [finding in found for found in findings] == [True] * bool(finding), findings


def test_responses_are_parted_by_sets_as_they_were_configured() -> None:
    responses = make_run(1)[0].samples
    assert by_set(responses, {"prompts": 4}) == {"": responses}
    named = {"prompts": 3, "sets": {"easy": {"prompts": 1}, "hard": {}}}
    assert by_set(responses, named) == {"easy": responses[:1], "hard": responses[1:]}
    assert by_set(responses, {**named, "source": "jsonl", "prompts": 2}) == {}
