"""Which temperature do log-probs belong to? Asked when two sides have equal logits and other log-probs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from vime_core.types import Float32Array

Doubles = NDArray[np.float64]
_GRID: Final = np.geomspace(0.2, 5.0, 81)
_REFINEMENTS: Final = 40
EXPLAINS: Final = 1e-4
"""Nats within which a temperature must reproduce every log-prob to count as the one that was used."""


@dataclass(frozen=True)
class Fit:
    """The temperature that comes nearest, and the largest error that it leaves, in nats."""

    temperature: float
    error: float

    @property
    def explains(self) -> bool:
        """Whether log-probs at this temperature are the given ones, but for rounding."""
        return self.error < EXPLAINS


def fit_temperature(logits_TV: NDArray[Any], tokens: NDArray[np.int64], log_probs: Float32Array) -> Fit:
    """Search for T in ``log_softmax(logits / T)[token]`` = log-prob, over [0.2, 5], in fp64.

    Args:
        logits_TV: finite, one row a token.
        tokens: int64 [T].
        log_probs: fp32 [T].
    """
    logits = logits_TV.astype(np.float64)

    def error(temperature: float) -> float:
        return float(np.abs(_log_probs(logits / temperature, tokens) - log_probs).max())

    errors = [error(float(t)) for t in _GRID]
    best = int(np.argmin(errors))
    low, high = _GRID[max(best - 1, 0)], _GRID[min(best + 1, len(_GRID) - 1)]
    for _ in range(_REFINEMENTS):
        third = (high - low) / 3
        low, high = (low, high - third) if error(low + third) < error(high - third) else (low + third, high)
    temperature = float((low + high) / 2)
    return Fit(temperature, error(temperature))


def _log_probs(z_TV: Doubles, tokens: NDArray[np.int64]) -> Doubles:
    shifted = z_TV - z_TV.max(axis=1, keepdims=True)
    chosen = np.take_along_axis(shifted, tokens[:, None], axis=1)[:, 0]
    return chosen - np.log(np.exp(shifted).sum(axis=1))
