"""Importance correction for what the engine sampled with and the trainer computes: weights from the log-ratios.

Source: truncated importance sampling for RL with two engines (F. Yao et al., Your efficient RL framework secretly
brings you off-policy RL training, 2025); masking and rejection: the same ratio outside its bounds drops the token or
the response. Where both sides hold the same bits every ratio is exactly 1 and nothing changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from vime_core.types import Float32Array

Level = Literal["off", "token", "sequence"]
Mode = Literal["truncate", "clip", "mask"]


@dataclass(frozen=True)
class Corrected:
    """Factors of the loss weights, fp32 [R] a response, and what happened: shares of all tokens, and ratios."""

    factors: list[Float32Array]
    metrics: dict[str, float]


def importance_factors(
    train: Sequence[Float32Array],
    rollout: Sequence[Float32Array],
    *,
    level: Level,
    mode: Mode,
    low: float,
    high: float,
    reject: bool = False,
) -> Corrected:
    """Factors from ``ratio = exp(train - rollout)``, detached from any gradient.

    Args:
        train: log-probs of the trainer before the update, fp32 [R] a response.
        rollout: those that the engine sampled with.
        level: ``token``: each token's own ratio; ``sequence``: the product over the response, for all of its tokens.
        mode: ``truncate``: ``min(ratio, high)``; ``clip``: ``ratio`` within ``[low, high]``; ``mask``: the ratio within
            the bounds, 0 outside.
        low: lower bound.
        high: upper bound.
        reject: drop a whole response (factor 0) when its sequence ratio is outside the bounds.

    Raises:
        ValueError: the two sides have other lengths, or the bounds are out of order.
    """
    if not 0 <= low <= high or any(len(a) != len(b) for a, b in zip(train, rollout, strict=True)):
        raise ValueError(f"bounds {low} and {high}, or the lengths of the responses, do not fit")
    logs = [a.astype(np.float64) - b.astype(np.float64) for a, b in zip(train, rollout, strict=True)]
    products = [float(np.exp(values.sum())) for values in logs]
    ratios = [np.exp(v) if level == "token" else np.full(len(v), p) for v, p in zip(logs, products, strict=True)]
    kept = [not reject or low <= product <= high for product in products]
    factors = [_bounded(r, mode, low, high) * keep for r, keep in zip(ratios, kept, strict=True)]
    if level == "off":
        factors = [np.full(len(r), float(keep)) for r, keep in zip(ratios, kept, strict=True)]
    return Corrected([f.astype(np.float32) for f in factors], _metrics(ratios, factors, kept, low, high))


def _bounded(ratio: np.ndarray, mode: Mode, low: float, high: float) -> np.ndarray:
    if mode == "truncate":
        return np.minimum(ratio, high)
    if mode == "clip":
        return np.clip(ratio, low, high)
    return np.where((ratio >= low) & (ratio <= high), ratio, 0.0)


def _metrics(
    ratios: list[np.ndarray], factors: list[np.ndarray], kept: list[bool], low: float, high: float
) -> dict[str, float]:
    ratio, factor = np.concatenate(ratios), np.concatenate(factors)
    return {
        "correction/ratio": float(ratio.mean()),
        "correction/ratio_max": float(ratio.max()),
        "correction/below": float((ratio < low).mean()),
        "correction/above": float((ratio > high).mean()),
        "correction/zero": float((factor == 0).mean()),
        "correction/rejected": 1.0 - sum(kept) / len(kept),
    }
