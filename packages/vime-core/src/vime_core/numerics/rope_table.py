"""The table of rotary embeddings: cosines and sines of fp64 angles, rounded once to fp32.

    table[p] = [cos(p f_i) * a, i < R/2 | sin(p f_i) * a],  f_i = theta^(-2i/R) scaled by the rope type

The table has as many rows as the model's config says on both sides, never as many as a batch needs. numpy computes it
in one thread with one routine for every element, so the number of threads of a process changes no bit.

Rope types follow the configs of transformers: ``default``, ``linear`` (Chen et al., 2023), ``llama3`` (Llama 3.1) and
``yarn`` (Peng et al., 2023).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vime_core.errors import PolicyError

_KINDS: Final = ("default", "linear", "llama3", "yarn")
_KEYS: Final = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_positions",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "attention_factor": "attention_factor",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "truncate": "truncate",
    "partial_rotary_factor": "partial",
}


@dataclass(frozen=True)
class RopeScaling:
    """How a structure's frequencies are scaled; fields that a kind does not use are ignored by it.

    Args:
        kind: ``default``, ``linear``, ``llama3`` or ``yarn``.
        factor: how much longer the context became.
        original_positions: the context of pretraining (llama3, yarn).
        partial: the share of a head that turns.
    """

    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    partial: float = 1.0


def rope_scaling(parameters: Mapping[str, object], max_positions: int) -> tuple[float, RopeScaling]:
    """(theta, scaling) of a config's ``rope_parameters`` (or ``rope_scaling`` with ``rope_theta`` in it).

    Raises:
        PolicyError: a rope type or a key that the contract does not define.
    """
    given = {key: value for key, value in parameters.items() if value is not None}
    theta = cast("float", given.pop("rope_theta", 10000.0))
    named = given.pop("rope_type", "default"), given.pop("type", None)
    kind = str(named[1] if named[0] == "default" and named[1] else named[0])
    unknown = sorted(given.keys() - _KEYS.keys())
    if kind not in _KINDS or unknown:
        what = f"rope_type {kind!r}" if kind not in _KINDS else f"rope parameter {unknown[0]!r}"
        raise PolicyError(
            f"{what} has no definition in dense/v1",
            remedy=f"Use a model whose rope_type is one of: {', '.join(_KINDS)}.",
            code="VIME-ENV-046",
        )
    fields = {"original_positions": max_positions, **{_KEYS[key]: value for key, value in given.items()}}
    return float(theta), RopeScaling(kind=kind, **cast("dict[str, Any]", fields))


def _llama3(frequencies: NDArray[np.float64], scaling: RopeScaling) -> NDArray[np.float64]:
    turns = scaling.original_positions * frequencies / (2 * math.pi)  # context over wavelength
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)
    return (1 - smooth) * frequencies / scaling.factor + smooth * frequencies


def _yarn(frequencies: NDArray[np.float64], theta: float, scaling: RopeScaling) -> NDArray[np.float64]:
    half = len(frequencies)

    def dimension(rotations: float) -> float:
        return half * math.log(scaling.original_positions / (rotations * 2 * math.pi)) / math.log(theta)

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    ramp = np.clip((np.arange(half) - low) / ((high - low) or 0.001), 0.0, 1.0)
    return frequencies / scaling.factor * ramp + frequencies * (1 - ramp)


def _magnitude(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _attention_factor(scaling: RopeScaling) -> float:
    if scaling.kind != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return _magnitude(scaling.factor, scaling.mscale) / _magnitude(scaling.factor, scaling.mscale_all_dim)
    return _magnitude(scaling.factor, 1.0)


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling) -> NDArray[np.float64]:
    """The R/2 angles of one position step."""
    rotary = int(head_dim * scaling.partial)
    frequencies = np.array([theta ** -(2.0 * i / rotary) for i in range(rotary // 2)], dtype=np.float64)
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(frequencies, scaling)
    return _yarn(frequencies, theta, scaling) if scaling.kind == "yarn" else frequencies


def rope_table(positions: int, head_dim: int, theta: float, scaling: RopeScaling | None = None) -> Tensor:
    """(positions, R) in fp32: cosines, then sines; R = head_dim, or the part of it that turns."""
    scaling = scaling or RopeScaling()
    angles = np.outer(np.arange(positions, dtype=np.float64), rope_frequencies(head_dim, theta, scaling))
    factor = _attention_factor(scaling)
    pair = np.concatenate([np.cos(angles) * factor, np.sin(angles) * factor], axis=1)
    return torch.from_numpy(pair.astype(np.float32))  # pyright: ignore[reportUnknownMemberType]
