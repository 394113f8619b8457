"""The metrics of a step that follow from what is recorded, computed anew from the record.

Written apart from what a run computes them with, so that neither an edited number nor a wrong formula agrees.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from vime_core.record.schema import StepEntry
from vime_core.types import Sample

if TYPE_CHECKING:
    from vime_core.record.reader import StepSamples


Evaluated = Mapping[str, Sequence[Sample]]
"""Responses by evaluation set; the unnamed set's name is empty."""


def metric_findings(entry: StepEntry, step: StepSamples, evaluation: Evaluated) -> Iterator[str]:
    """Where a step's line disagrees with its samples, updates or evaluation."""
    for name, value in recomputed(entry, step, evaluation).items():
        told = entry.metrics.get(name)
        if told is not None and told != value.hex():
            yield f"metric {name} is {told}, and what is stored gives {value.hex()}"


def recomputed(entry: StepEntry, step: StepSamples, evaluation: Evaluated) -> dict[str, float]:
    """Every metric of a step that its record decides, by name."""
    metrics = {**_of_samples(step.samples), **_of_updates(entry), **_of_log_probs(step)}
    for name, samples in evaluation.items():
        prefix = f"evaluation/{name}/" if name else "evaluation/"
        metrics[f"{prefix}reward"] = math.fsum(one.reward for one in samples) / len(samples)
        metrics[f"{prefix}response_length"] = _mean_length(samples)
        metrics[f"{prefix}truncated"] = sum(one.finish_reason == "length" for one in samples) / len(samples)
    return metrics


def by_set(samples: Sequence[Sample], section: Mapping[str, Any]) -> dict[str, Sequence[Sample]]:
    """Stored responses by evaluation set, as the configuration's section orders them; of a set that is shorter than it
    was asked for nobody knows where the next begins, and then nothing is returned."""
    sets: Mapping[str, Any] = section.get("sets") or {}
    usual = section.get("prompts")
    sizes: dict[str, Any] = {"": usual} if section.get("source") or not sets else {}
    sizes |= {name: one.get("prompts") or usual for name, one in sets.items()}
    if len(sizes) == 1:
        return dict.fromkeys(sizes, samples)
    ends = list(accumulate(sizes.values()))
    if ends[-1] != len(samples):
        return {}
    return {name: samples[end - sizes[name] : end] for name, end in zip(sizes, ends, strict=True)}


def _of_samples(samples: Sequence[Sample]) -> dict[str, float]:
    rewards = [sample.reward for sample in samples]
    prompts = {sample.prompt_index: sample.prompt_tokens for sample in samples}
    by_prompt = {index: {s.reward for s in samples if s.prompt_index == index} for index in prompts}
    responses = Counter((sample.prompt_index, sample.response_tokens) for sample in samples)
    return {
        "reward/mean": math.fsum(rewards) / len(rewards),
        "reward/max": max(rewards),
        "reward/min": min(rewards),
        "reward/flat_groups": sum(len(values) == 1 for values in by_prompt.values()) / len(by_prompt),
        "data/repeated_prompts": float(len(prompts) - len(set(prompts.values()))),
        "rollout/response_length": _mean_length(samples),
        "rollout/truncated": sum(sample.finish_reason == "length" for sample in samples) / len(samples),
        "rollout/duplicate_groups": float(sum(count > 1 for count in responses.values())),
        "rollout/samples": float(len(samples)),
        "rollout/tokens": float(sum(len(sample.response_tokens) for sample in samples)),
    }


def _of_updates(entry: StepEntry) -> dict[str, float]:
    losses, norms, rates = (
        [float.fromhex(getattr(update, name)) for update in entry.updates]
        for name in ("loss", "grad_norm", "learning_rate")
    )
    if not losses:
        return {}
    return {
        "train/loss": math.fsum(losses) / len(losses),
        "train/grad_norm": max(norms),
        "train/learning_rate": rates[-1],
    }


def _of_log_probs(step: StepSamples) -> dict[str, float]:
    rollout = np.concatenate([sample.rollout_log_probs for sample in step.samples]).astype(np.float64)
    train = np.concatenate(step.train_log_probs).astype(np.float64)
    if rollout.shape != train.shape or not rollout.size:
        return {}
    difference = np.abs(rollout - train)
    name = "train_rollout_logprob_abs_diff"
    return {
        name: float(difference.mean()),
        f"{name}/max": float(difference.max()),
        f"{name}/unequal": float((difference != 0).mean()),
        "rollout/entropy": float(-rollout.mean()),
    }


def _mean_length(samples: Sequence[Sample]) -> float:
    return sum(len(sample.response_tokens) for sample in samples) / len(samples)
