"""Under a contract every step is a check: the trainer's log-prob of a token is the one it was sampled with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vime_core.errors import ContractViolation
from vime_core.types import Float32Array, Sample


def require_aligned(contract: str, step: int, samples: Sequence[Sample], log_probs: Sequence[Float32Array]) -> None:
    """Compare raw bits of what the engine sampled with and of the trainer's forward before any update.

    Args:
        contract: id of the contract; empty: nothing was promised and nothing is compared.
        step: for the message.
        samples: all of the step.
        log_probs: fp32 [R] a sample, by the weights that sampled it: of the training forward for the step's first
            optimizer step, of a forward before it for the later ones.

    Raises:
        ContractViolation: a log-prob differs (NaN always does), or nothing was compared.
    """
    if not contract:
        return
    pairs = list(zip(samples, log_probs, strict=True))
    tokens = sum(len(values) for _, values in pairs)
    if tokens == 0:
        raise _violation(contract, step, "nothing could be compared")
    places = [(s, int(t), v) for s, v in pairs for t in np.flatnonzero(_unequal(s.rollout_log_probs, v))]
    if places:
        sample, token, values = places[0]
        engine, trainer = float(sample.rollout_log_probs[token]), float(values[token])
        raise _violation(
            contract,
            step,
            f"{len(places)} of {tokens} log-probs differ, first in sample {sample.key} (prompt, sample), token {token}:"
            f" {engine!r} in the engine, {trainer!r} in the trainer",
        )


def _unequal(first: Float32Array, second: Float32Array) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    return (first.view(np.uint32) != second.view(np.uint32)) | np.isnan(first) | np.isnan(second)


def _violation(contract: str, step: int, what: str) -> ContractViolation:
    return ContractViolation(
        f"contract {contract} does not hold in step {step}: {what}",
        remedy="The step is recorded; `vime verify align CONFIG --layers` finds the operation. Do not use this run.",
        code="VIME-ALIGN-005",
    )
