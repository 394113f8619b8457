"""How much the compared distributions vary: equality of constants proves nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from vime_core.types import Float32Array

NEAR_CONSTANT: Final = 0.01
"""Standard deviation of log-probs, in nats, below which they count as near-constant."""


@dataclass(frozen=True)
class Spread:
    """Of log-probs of sampled tokens: ``entropy`` is the mean of minus log-prob (nats a token, an unbiased estimate
    of the mean entropy of what was sampled from), ``deviation`` their standard deviation. Both 0 without tokens."""

    entropy: float
    deviation: float

    @property
    def near_constant(self) -> bool:
        """True when the values could hardly show a fault."""
        return not self.deviation >= NEAR_CONSTANT


def spread(log_probs: Sequence[Float32Array]) -> Spread:
    """The spread of all values together; NaN when one of them is."""
    values = np.concatenate([*log_probs, np.zeros(0, dtype=np.float32)]).astype(np.float64)
    if not values.size:
        return Spread(0.0, 0.0)
    return Spread(float(-values.mean()), float(values.std()))
