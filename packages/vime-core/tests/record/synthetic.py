"""Small records, written by the real writer, for tests that then spoil them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from vime_core.record.digest import array_digest, merkle_root
from vime_core.record.reader import RunRecord
from vime_core.record.samples import log_prob_digest, sample_columns, sampled_digests, step_digests
from vime_core.record.schema import Manifest, StepEntry, UpdateEntry
from vime_core.record.writer import RecordWriter
from vime_core.types import Float32Array, Sample

Arrays = dict[str, np.ndarray[Any, Any]]
CONFIG: dict[str, Any] = {
    "run": {"name": "synthetic", "output": "somewhere", "seed": 7},
    "trainer": {"lr": 1e-3, "betas": [0.9, 0.98]},
}


@dataclass(frozen=True)
class Update:
    gradients: Arrays
    samples: int
    loss: float = 0.125
    grad_norm: float = 1.5
    learning_rate: float = 1e-3


@dataclass(frozen=True)
class Step:
    step: int
    samples: tuple[Sample, ...]
    advantages: Float32Array
    train_log_probs: tuple[Float32Array, ...]
    updates: tuple[Update, ...]
    weights: Arrays
    optimizer: Arrays
    evaluation: tuple[Sample, ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)
    reference_log_probs: tuple[Float32Array, ...] = ()


def tensors(seed: int) -> Arrays:
    rng = np.random.default_rng(seed)
    return {
        "embed.weight": rng.standard_normal((6, 4)).astype(np.float32),
        "layers.0.mlp.weight": rng.standard_normal((4, 4)).astype(np.float32),
        "norm.weight": np.ones(4, dtype=np.float32) + np.float32(seed) / 8,
    }


def sample(step: int, prompt: int, index: int) -> Sample:
    rng = np.random.default_rng([step, prompt, index])
    length = 3 + (prompt + index) % 3
    return Sample(
        prompt_index=2 * step + prompt,
        sample_index=index,
        dataset_index=10 * step + prompt,
        prompt_tokens=(1, 2 + prompt, 3),
        response_tokens=tuple(rng.integers(0, 500, length).tolist()),
        rollout_log_probs=-rng.random(length, dtype=np.float32) * 3,
        loss_mask=(True,) * length,
        reward=float(index == 0),
        weight_version=step,
        finish_reason="stop" if index else "length",
        seed=2**64 - 1 - index - 100 * prompt,
        response_text=f"é {prompt} {index}",
    )


def make_step(step: int, updates: int = 1) -> Step:
    samples = tuple(sample(step, prompt, index) for prompt in (0, 1) for index in (0, 1))
    per_update = len(samples) // updates
    return Step(
        step=step,
        samples=samples,
        advantages=np.array([1, -1, 1, -1], dtype=np.float32),
        train_log_probs=tuple(s.rollout_log_probs + np.float32(1e-3) for s in samples),
        updates=tuple(Update(tensors(100 * step + 50 + u), per_update) for u in range(updates)),
        weights=tensors(step + 1),
        optimizer={f"{name}.exp_avg": value for name, value in tensors(200 + step).items()},
    )


def with_evaluation(steps: list[Step], step: int, *responses: Sample) -> list[Step]:
    """The same steps with an evaluation before one of them; by default of two responses."""
    samples = responses or tuple(replace(sample(step, prompt, 0), prompt_index=prompt) for prompt in (0, 1))
    return change_step(steps, step, evaluation=samples)


def make_run(steps: int = 2, updates: int = 1) -> list[Step]:
    return [make_step(number, updates) for number in range(steps)]


def digests(arrays: Arrays) -> dict[str, str]:
    return {name: array_digest(name, array) for name, array in arrays.items()}


def entry_of(step: Step) -> StepEntry:
    stages = step_digests(step.samples, step.advantages)
    weights, optimizer = digests(step.weights), digests(step.optimizer)
    return StepEntry(
        step=step.step,
        weight_version=step.step,
        **vars(stages),
        reference_log_probs=log_prob_digest([s.key for s in step.samples], step.reference_log_probs)
        if step.reference_log_probs
        else "",
        updates=tuple(_update_entries(step)),
        weights=weights,
        weights_root=merkle_root(weights),
        optimizer=optimizer,
        optimizer_root=merkle_root(optimizer),
        metrics={name: value.hex() for name, value in {**metrics_of(step), **step.metrics}.items()},
        evaluation=sampled_digests(sample_columns(step.evaluation)) if step.evaluation else {},
        timings={"generate": 0.1},
    )


def metrics_of(step: Step) -> dict[str, float]:
    """Two of a step's metrics: one of its samples, one of its updates."""
    rewards = [sample.reward for sample in step.samples]
    return {"reward/mean": math.fsum(rewards) / len(rewards), "train/grad_norm": max(u.grad_norm for u in step.updates)}


def _update_entries(step: Step) -> list[UpdateEntry]:
    entries: list[UpdateEntry] = []
    start = 0
    for update in step.updates:
        part = slice(start, start + update.samples)
        start += update.samples
        gradients = digests(update.gradients)
        entries.append(
            UpdateEntry(
                loss=update.loss.hex(),
                grad_norm=update.grad_norm.hex(),
                learning_rate=update.learning_rate.hex(),
                train_log_probs=log_prob_digest([s.key for s in step.samples[part]], step.train_log_probs[part]),
                gradients=gradients,
                gradients_root=merkle_root(gradients),
                samples=update.samples,
            )
        )
    return entries


def manifest(**changes: Any) -> Manifest:
    initial = digests(tensors(0))
    return Manifest(
        **{
            "vime_version": "0.1.0",
            "config": CONFIG,
            "policy": "reproducible/v1",
            "platform": {"machine": "x86_64"},
            "model_root": merkle_root(initial),
            "initial_weights": initial,
            **changes,
        }
    )


def write_step(writer: RecordWriter, step: Step, taps: Mapping[str, bytes] = MappingProxyType({})) -> None:
    samples = (step.samples, step.train_log_probs, step.advantages, step.evaluation, step.reference_log_probs or None)
    writer.write_step(entry_of(step), *samples, taps=taps)


def write_run(directory: Path, steps: list[Step], *, status: str = "complete", **changes: Any) -> RunRecord:
    """Write a record; ``status`` "running" leaves it as a killed process would."""
    writer = RecordWriter.create(directory, manifest(**changes))
    for step in steps:
        write_step(writer, step)
    if status != "running":
        writer.finish(status)  # type: ignore[arg-type]
    return RunRecord.open(directory)


def change_sample(steps: list[Step], step: int, index: int, **changes: Any) -> list[Step]:
    samples = list(steps[step].samples)
    samples[index] = replace(samples[index], **changes)
    return change_step(steps, step, samples=tuple(samples))


def change_step(steps: list[Step], step: int, **changes: Any) -> list[Step]:
    changed = list(steps)
    changed[step] = replace(changed[step], **changes)
    return changed


def flip_bit(array: np.ndarray[Any, Any], place: int, bit: int = 0) -> np.ndarray[Any, Any]:
    """A copy with one bit of one element flipped."""
    copy = array.copy()
    words = copy.reshape(-1).view(np.uint32)
    words[place] ^= np.uint32(1 << bit)
    return copy
