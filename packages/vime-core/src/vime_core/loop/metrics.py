"""Numbers of a step for people. Verdicts compare the record's digests, never these."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from vime_core.errors import BackendError
from vime_core.loop.timing import PhaseTimer
from vime_core.rl.seeds import duplicate_groups
from vime_core.types import Float32Array, Sample, TrainStepResult

ABS_DIFF = "train_rollout_logprob_abs_diff"


def step_metrics(
    samples: Sequence[Sample],
    train_log_probs: Sequence[Float32Array],
    results: Sequence[TrainStepResult],
    timer: PhaseTimer,
) -> dict[str, float]:
    """Metrics of a step. Raises BackendError when a log-prob of either side is not finite."""
    rewards = [sample.reward for sample in samples]
    lengths = [len(sample.response_tokens) for sample in samples]
    tokens = sum(lengths)
    metrics = {
        "reward/mean": math.fsum(rewards) / len(rewards),
        "reward/max": max(rewards),
        "reward/min": min(rewards),
        "reward/flat_groups": _share_of_flat_groups(samples),
        "data/repeated_prompts": float(_repeated_prompts(samples)),
        "rollout/response_length": tokens / len(lengths),
        "rollout/truncated": sum(s.finish_reason == "length" for s in samples) / len(samples),
        "rollout/duplicate_groups": float(len(duplicate_groups(samples))),
        "rollout/samples": float(len(samples)),
        "rollout/tokens": float(tokens),
        "train/loss": math.fsum(r.loss for r in results) / len(results),
        "train/grad_norm": max(r.grad_norm for r in results),
        "train/learning_rate": results[-1].learning_rate,
        "time/tokens_per_s": tokens / timer.seconds["generate"],
    }
    metrics |= mismatch(samples, train_log_probs)
    for result in results:
        metrics |= {f"train/{name}": value for name, value in result.metrics.items()}
    return metrics


def _share_of_flat_groups(samples: Sequence[Sample]) -> float:
    """The share of prompts whose samples all have one reward: by group-relative advantages they teach nothing."""
    rewards: dict[int, set[float]] = {}
    for sample in samples:
        rewards.setdefault(sample.prompt_index, set()).add(sample.reward)
    return sum(len(values) == 1 for values in rewards.values()) / len(rewards)


def _repeated_prompts(samples: Sequence[Sample]) -> int:
    """How many of the step's prompts are token for token one that came before in it."""
    prompts = {sample.prompt_index: sample.prompt_tokens for sample in samples}
    return len(prompts) - len(set(prompts.values()))


def mismatch(samples: Sequence[Sample], train_log_probs: Sequence[Float32Array]) -> dict[str, float]:
    """How far the training forward's log-probs are from those that the engine sampled with."""
    rollout = np.concatenate([sample.rollout_log_probs for sample in samples]).astype(np.float64)
    train = np.concatenate(list(train_log_probs)).astype(np.float64)
    for side, values in (("rollout engine", rollout), ("trainer", train)):
        if not np.isfinite(values).all():
            raise BackendError(
                f"{int((~np.isfinite(values)).sum())} of {values.size} log-probs of the {side} are not finite",
                remedy="Look at the step's samples in the record; a learning rate that is too high is a usual cause.",
                code="VIME-BACKEND-002",
            )
    difference = np.abs(rollout - train)
    return {
        ABS_DIFF: float(difference.mean()),
        f"{ABS_DIFF}/max": float(difference.max()),
        f"{ABS_DIFF}/unequal": float((difference != 0).mean()),
        "rollout/entropy": float(-rollout.mean()),
    }
