"""Rotary position embedding: from a HF configuration to a table, and its application to packed tokens.

Angles and table as `vime_core.numerics.rope_table` defines them, rotation in fp32 with one rounding. Source: RoFormer
(arXiv 2104.09864), with the halves of a head rotated against each other (GPT-NeoX), as Llama and Qwen do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from vime_core import numerics
from vime_core.errors import ConfigError, PolicyError
from vime_core.numerics import RopeScaling, rope_scaling
from vime_megatron.autograd import apply


class Rope(NamedTuple):
    """Base and scaling of the angles."""

    theta: float
    scaling: RopeScaling = RopeScaling()


def read_rope(config: Mapping[str, Any]) -> Rope:
    """The rotary embedding of a ``config.json``: ``rope_parameters``, or the older ``rope_theta``, ``rope_scaling``.

    Raises:
        ConfigError: a rope type or key that is not built in, or a partial rotary factor.
    """
    old: Mapping[str, Any] = {**(config.get("rope_scaling") or {}), "rope_theta": config.get("rope_theta")}
    given = cast("Mapping[str, Any]", config.get("rope_parameters") or old)
    partial = given.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise _unsupported(f"config.json has partial_rotary_factor = {partial!r}, which vime-megatron does not build")
    try:
        return Rope(*rope_scaling(given, config["max_position_embeddings"]))
    except PolicyError as error:
        raise _unsupported(f"config.json: {error.message}") from error


def _unsupported(message: str) -> ConfigError:
    return ConfigError(
        message,
        remedy="Use a model with rope_type 'default', 'linear', 'llama3' or 'yarn' over the whole head.",
        code="VIME-CONFIG-052",
    )


def rope_table(rope: Rope, head_dim: int, positions: int) -> Tensor:
    """Cosines, then sines: fp32 [2, positions, head_dim / 2]."""
    return torch.stack(numerics.rope_table(positions, head_dim, *rope).chunk(2, dim=-1))


class _Rotate(torch.autograd.Function):
    """A rotation and a factor: its gradient is the rotation by the negative angle, so no input is kept."""

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
