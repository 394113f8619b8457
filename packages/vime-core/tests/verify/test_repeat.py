"""The verdict and its negative controls: each planted fault must keep it from holding, and be named."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic import CONFIG, Step, change_sample, change_step, flip_bit, make_run, tensors, with_evaluation, write_run

from vime_core.errors import RecordError
from vime_core.record.reader import RunRecord
from vime_core.verify.repeat import verify_repeat
from vime_core.verify.verdict import Coverage, Verdict

BASE = make_run(2)


def verdict_on(
    tmp_path: Path, a: list[Step], b: list[Step], both: dict[str, Any] | None = None, **second: Any
) -> Verdict:
    first = write_run(tmp_path / "a", a, **(both or {}))
    return verify_repeat(first, write_run(tmp_path / "b", b, **{**(both or {}), **second}))


def each_step(change: Callable[[Step], Step]) -> list[Step]:
    return [change(step) for step in BASE]


def with_log_probs(make: Callable[[int, int], Any]) -> list[Step]:
    """Every response's log-probs as ``make(sample number, length)`` says, in rollout and training."""

    def change(step: Step) -> Step:
        rows = [np.asarray(make(i, len(s.response_tokens)), dtype=np.float32) for i, s in enumerate(step.samples)]
        samples = tuple(replace(s, rollout_log_probs=row) for s, row in zip(step.samples, rows, strict=True))
        return replace(step, samples=samples, train_log_probs=tuple(rows))

    return each_step(change)


def test_two_equal_runs_hold(tmp_path: Path) -> None:
    verdict = verdict_on(tmp_path, BASE, BASE)
    assert verdict.holds is True
    assert verdict.exit_code == 0
    tokens = sum(len(s.response_tokens) for step in BASE for s in step.samples)
    assert verdict.coverage == Coverage(steps=2, samples=8, tokens=tokens, tensors=2 * 9 + 3, log_probs=2 * tokens)
    assert verdict.changed == 1.0
    values = np.concatenate([s.rollout_log_probs for step in BASE for s in step.samples]).astype(np.float64)
    assert verdict.entropy == -values.mean()
    assert "2 steps" in verdict.sentence
    assert f"{tokens} sampled tokens" in verdict.sentence
    assert "0 unequal" in verdict.sentence
    assert json.loads(json.dumps(verdict.as_json(), allow_nan=False))["exit_code"] == 0


def test_name_and_output_may_differ(tmp_path: Path) -> None:
    moved = {**CONFIG, "run": {**CONFIG["run"], "name": "b", "output": "b"}}
    assert verdict_on(tmp_path, BASE, BASE, config=moved).exit_code == 0


def flipped_log_prob() -> list[Step]:
    sample = BASE[1].samples[2]
    return change_sample(BASE, 1, 2, rollout_log_probs=flip_bit(sample.rollout_log_probs, 1))


def flipped_weight() -> list[Step]:
    name = "layers.0.mlp.weight"
    return change_step(BASE, 1, weights={**BASE[1].weights, name: flip_bit(BASE[1].weights[name], 5)})


def dropped_sample() -> list[Step]:
    step = BASE[1]
    return change_step(
        BASE,
        1,
        samples=step.samples[:3],
        advantages=step.advantages[:3],
        train_log_probs=step.train_log_probs[:3],
        updates=(replace(step.updates[0], samples=3),),
    )


def duplicated_sample() -> list[Step]:
    step = BASE[1]
    return change_step(
        BASE,
        1,
        samples=(*step.samples, replace(step.samples[3], sample_index=2)),
        advantages=np.append(step.advantages, step.advantages[3]),
        train_log_probs=(*step.train_log_probs, step.train_log_probs[3]),
        updates=(replace(step.updates[0], samples=5),),
    )


@pytest.mark.parametrize(
    ("steps", "first", "unequal"),
    [
        (flipped_log_prob(), "step 1, rollout log-probs, prompt 3, sample 0, token 1", 1),
        (flipped_weight(), "step 1, weights, tensor 'layers.0.mlp.weight'", 1),
        (dropped_sample(), "step 1, prompts, prompt 3, sample 1", 1),
        (duplicated_sample(), "step 1, prompts, prompt 3, sample 2", 1),
        (BASE[:1], "step 1, steps", 1),
    ],
    ids=["log-prob bit", "weight bit", "dropped sample", "duplicated sample", "truncated steps"],
)
@pytest.mark.parametrize("swapped", [False, True])
def test_planted_differences(tmp_path: Path, steps: list[Step], first: str, unequal: int, swapped: bool) -> None:
    verdict = verdict_on(tmp_path, *((steps, BASE) if swapped else (BASE, steps)))
    assert verdict.holds is False
    assert verdict.exit_code == 1
    assert verdict.first == first
    assert verdict.unequal == unequal
    assert verdict.sentence.startswith("Repeat does not hold. S")


def test_a_flipped_log_prob_has_its_size(tmp_path: Path) -> None:
    verdict = verdict_on(tmp_path, BASE, flipped_log_prob())
    assert verdict.largest_ulps == 1
    assert 0 < verdict.largest_difference < 1e-6


def nan_in_log_probs() -> list[Step]:
    row = BASE[1].samples[2].rollout_log_probs.copy()
    row[1] = np.nan
    return change_sample(BASE, 1, 2, rollout_log_probs=row)


def nan_in_train_log_probs() -> list[Step]:
    rows = list(BASE[1].train_log_probs)
    rows[2] = rows[2] * np.float32(np.nan)
    return change_step(BASE, 1, train_log_probs=tuple(rows))


def nan_in_reference_log_probs() -> list[Step]:
    """As where the KL to the reference is reported and not in the loss."""
    rows = [list(step.train_log_probs) for step in BASE]
    rows[1][3] = rows[1][3] * np.float32(np.nan)
    return [replace(step, reference_log_probs=tuple(row)) for step, row in zip(BASE, rows, strict=True)]


@pytest.mark.parametrize(
    ("steps", "first"),
    [
        (nan_in_reference_log_probs(), "step 1, reference log-probs"),
        (nan_in_log_probs(), "step 1, rollout log-probs"),
        (nan_in_train_log_probs(), "step 1, train log-probs"),
        (change_sample(BASE, 1, 0, reward=math.nan), "step 1, rewards"),
        (change_step(BASE, 1, advantages=np.array([0, 0, 0, np.nan], dtype=np.float32)), "step 1, advantages"),
        (change_step(BASE, 1, updates=(replace(BASE[1].updates[0], loss=math.nan),)), "step 1, loss"),
        (change_step(BASE, 0, updates=(replace(BASE[0].updates[0], grad_norm=math.nan),)), "step 0, grad_norm"),
        (change_step(BASE, 0, metrics={"evaluation/reward": math.nan}), "step 0, metric evaluation/reward"),
    ],
)
def test_nan_in_both_does_not_hold(tmp_path: Path, steps: list[Step], first: str) -> None:
    verdict = verdict_on(tmp_path, steps, steps)
    assert verdict.exit_code == 1
    assert verdict.first == first
    assert math.isnan(verdict.largest_difference)
    assert "NaN" in verdict.sentence


def no_tokens() -> list[Step]:
    def change(step: Step) -> Step:
        none = np.zeros(0, dtype=np.float32)
        empty = {"response_tokens": (), "loss_mask": (), "rollout_log_probs": none}
        samples = tuple(replace(s, **empty) for s in step.samples)
        return replace(step, samples=samples, train_log_probs=(none,) * len(samples))

    return each_step(change)


def still_weights(step: Step) -> Step:
    return replace(step, weights=tensors(0))


UNCHECKED: dict[str, tuple[list[Step], dict[str, Any], dict[str, Any], str, str]] = {
    "two empty records": ([], {}, {}, "steps of the first record", "no sampled token"),
    "no tokens": (no_tokens(), {}, {}, "steps of the first record", "no sampled token"),
    "another config": (
        BASE,
        {},
        {"config": {**CONFIG, "trainer": {**CONFIG["trainer"], "lr": 1.0}}},
        "config, trainer.lr: 0.001 against 1.0",
        "the configurations differ: trainer.lr: 0.001 against 1.0",
    ),
    "one run failed": (BASE, {}, {"status": "failed"}, "status of the second record", "the second run is 'failed'"),
    "both still run": (BASE, {"status": "running"}, {}, "status of the first record", "the first run is 'running'"),
    "initial weights of one": (
        BASE,
        {},
        {"initial_weights": {}, "model_root": ""},
        "initial weights",
        "one record lacks",
    ),
    "one run twice": (BASE, {"run_id": "7"}, {}, "run_id", "both records are of one run (7)"),
    "constant log-probs": (with_log_probs(lambda _, n: [-1.5] * n), {}, {}, "log-probs", "hardly vary"),
    "near-constant log-probs": (
        with_log_probs(lambda i, n: -5.5 + 0.001 * np.arange(n) * (i + 1)),
        {},
        {},
        "log-probs",
        "around an entropy of 5.49",
    ),
    "weights stand still": (each_step(still_weights), {}, {}, "weights", "training changed no weight"),
    "one step, unknown start": (
        BASE[:1],
        {"initial_weights": {}, "model_root": ""},
        {},
        "weights",
        "it is unknown whether training changed them",
    ),
    "no gradients": (
        each_step(lambda s: replace(s, updates=(replace(s.updates[0], gradients={}),))),
        {},
        {},
        "step 0, gradients of update 0",
        "were not digested",
    ),
    "no weights": (change_step(BASE, 0, weights={}), {}, {}, "step 0, weights", "were not digested"),
    "no optimizer": (change_step(BASE, 1, optimizer={}), {}, {}, "step 1, optimizer state", "were not digested"),
}


@pytest.mark.parametrize("name", UNCHECKED)
def test_what_proves_nothing_is_not_checked(tmp_path: Path, name: str) -> None:
    steps, both, second, first, words = UNCHECKED[name]
    verdict = verdict_on(tmp_path, steps, steps, both, **second)
    assert verdict.holds is None
    assert verdict.exit_code == 3
    assert verdict.first == first
    assert verdict.sentence.startswith("Repeat could not be checked: ")
    assert words in verdict.sentence


def test_a_learning_rate_of_zero_may_leave_weights_alone(tmp_path: Path) -> None:
    def still(step: Step) -> Step:
        return replace(still_weights(step), updates=(replace(step.updates[0], learning_rate=0.0),))

    verdict = verdict_on(tmp_path, each_step(still), each_step(still))
    assert verdict.exit_code == 0
    assert verdict.changed == 0.0
    assert "the learning rate is 0" in verdict.sentence


def test_a_copied_record_is_no_second_run(tmp_path: Path) -> None:
    record = write_run(tmp_path / "a", BASE)
    shutil.copytree(record.directory, tmp_path / "b")
    assert verify_repeat(record, record).exit_code == 3
    assert verify_repeat(record, RunRecord.open(tmp_path / "b")).exit_code == 3


def test_an_edited_record_does_not_hold(tmp_path: Path) -> None:
    """One bit of a stored log-prob and one digit of a stored digest, edited in place."""
    a = write_run(tmp_path / "a", BASE)
    b = write_run(tmp_path / "b", BASE)
    shutil.copy(
        write_run(tmp_path / "c", flipped_log_prob()).directory / "samples" / "step-000001.parquet",
        b.directory / "samples",
    )
    verdict = verify_repeat(a, RunRecord.open(b.directory))
    assert verdict.exit_code == 1
    assert verdict.first == "second record, step 1: the digest of rollout log-probs is not that of the stored samples"
    path = a.directory / "steps.jsonl"
    leaf = a.steps[0].weights["norm.weight"]
    path.write_text(path.read_text().replace(leaf, leaf[::-1]))
    verdict = verify_repeat(RunRecord.open(a.directory), b)
    assert verdict.exit_code == 1
    assert "first record, step 0: weights: the root is not that" in verdict.first


def test_removed_steps_do_not_hold(tmp_path: Path) -> None:
    records = [write_run(tmp_path / name, BASE) for name in ("a", "b")]
    for record in records:
        path = record.directory / "steps.jsonl"
        path.write_text(path.read_text().splitlines(keepends=True)[0])
    verdict = verify_repeat(*(RunRecord.open(record.directory) for record in records))
    assert verdict.exit_code == 1
    assert "the manifest counts 2 steps, 1 are there" in verdict.sentence


def test_a_cut_line_of_a_complete_record_is_an_error(tmp_path: Path) -> None:
    a, b = (write_run(tmp_path / name, BASE) for name in ("a", "b"))
    path = b.directory / "steps.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(RecordError, match="is cut off although the record is complete"):
        verify_repeat(a, RunRecord.open(b.directory))


def test_steps_that_were_promised_but_lack_on_both_sides(tmp_path: Path) -> None:
    longer = {**CONFIG, "run": {**CONFIG["run"], "steps": 5}}
    a, b = (write_run(tmp_path / name, BASE, config=longer) for name in "ab")
    verdict = verify_repeat(a, b)
    assert (verdict.exit_code, verdict.coverage.nothing) == (1, True)
    assert "2 steps are there, where 5 were configured" in verdict.sentence


def test_evaluation_responses_are_compared(tmp_path: Path) -> None:
    steps = with_evaluation(BASE, 1)
    responses = list(steps[1].evaluation)
    responses[1] = replace(responses[1], response_text="other")
    verdict = verdict_on(tmp_path, steps, with_evaluation(BASE, 1, *responses))
    assert (verdict.exit_code, verdict.first) == (1, "step 1, evaluation, prompt 1, sample 0")
    assert "tokens: response_text is" in verdict.sentence
    assert verdict_on(tmp_path / "same", steps, steps).coverage.tokens == 32 + 7
