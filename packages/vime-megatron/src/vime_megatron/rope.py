"""Rotary position embedding: from a HF configuration to a table, and its application to packed tokens.

Angles in fp64, table in fp32, rotation in fp32 with one rounding. Source: RoFormer (arXiv 2104.09864), with the
halves of a head rotated against each other (GPT-NeoX), as Llama and Qwen do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from vime_core.errors import ConfigError
from vime_megatron.autograd import apply

DEFAULT_THETA = 10000.0


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's frequency bands: low frequencies are divided by ``factor``, high ones kept, a ramp between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True)
class Rope:
    """``scaling`` None: plain; a float: every frequency divided by it ("linear")."""

    theta: float
    scaling: float | Llama3Scaling | None = None


def read_rope(config: Mapping[str, Any]) -> Rope:
    """The rotary embedding of a ``config.json``: ``rope_parameters``, or the older ``rope_theta``, ``rope_scaling``.

    Raises:
        ConfigError: a rope type that is not built in, or a partial rotary factor.
    """
    old: Mapping[str, Any] = {**(config.get("rope_scaling") or {}), "rope_theta": config.get("rope_theta")}
    given = cast("Mapping[str, Any]", config.get("rope_parameters") or old)
    theta = given.get("rope_theta")
    kind = given.get("rope_type") or given.get("type") or "default"
    partial = given.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise _unsupported("partial_rotary_factor", partial)
    return Rope(DEFAULT_THETA if theta is None else float(theta), _scaling(str(kind), given))


def _scaling(kind: str, given: Mapping[str, Any]) -> float | Llama3Scaling | None:
    if kind == "default":
        return None
    if kind == "linear":
        return float(given["factor"])
    if kind == "llama3":
        return Llama3Scaling(
            float(given["factor"]),
            float(given["low_freq_factor"]),
            float(given["high_freq_factor"]),
            int(given["original_max_position_embeddings"]),
        )
    raise _unsupported("rope_type", kind)


def _unsupported(key: str, value: object) -> ConfigError:
    return ConfigError(
        f"config.json has {key} = {value!r}, which vime-megatron does not build",
        remedy="Use a model with rope_type 'default', 'linear' or 'llama3' over the whole head.",
        code="VIME-CONFIG-052",
    )


def frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Radians a position, fp64 [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    plain = torch.pow(torch.tensor(rope.theta, dtype=torch.float64), -exponents)
    if rope.scaling is None:
        return plain
    if isinstance(rope.scaling, Llama3Scaling):
        return _llama3(plain, rope.scaling)
    return plain / rope.scaling


def _llama3(plain: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Source: Llama 3.1's reference code, ``apply_scaling``."""
    turns = scaling.original_context * plain / (2 * math.pi)
    ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = ramp.clamp(0.0, 1.0)
    return keep * plain + (1.0 - keep) * plain / scaling.factor


def rope_table(rope: Rope, head_dim: int, positions: int) -> Tensor:
    """Cosines, then sines: fp32 [2, positions, head_dim / 2]."""
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * frequencies(rope, head_dim)
    return torch.stack([angles.cos(), angles.sin()]).float()


class _Rotate(torch.autograd.Function):
    """The rotation is orthogonal: its gradient is the rotation by the negative angle, so no input is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grads[0], cos, -sin), None, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each head by its token's angles.

    Args:
        x: [T, heads, D] in any floating dtype; the result has the same.
        cos: fp32 [T, 1, D / 2], the cosines of each token's position.
        sin: likewise.
    """
    return apply(_Rotate, x, cos, sin)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
