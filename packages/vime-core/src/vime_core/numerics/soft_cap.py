"""Soft cap: y = rn(c * tanh(x / c)), as some structures apply it to logits; dx = rn(dy * (1 - tanh^2)).

Elementwise and exact (arithmetic.tanh), so every provider shares this one implementation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vime_core.numerics.arithmetic import narrow, tanh, widen
from vime_core.numerics.gradients import needs_gradient, record


def capped(x: Tensor, cap: float) -> Tensor:
    """tanh(x / cap) of fp32 x."""
    return tanh(x / torch.full_like(x, cap))


class _SoftCap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cap: float) -> Tensor:
        ctx.cap = cap
        ctx.save_for_backward(x)
        return narrow(capped(widen(x), cap) * cap, x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        (x,) = ctx.saved_tensors
        t = capped(widen(x), ctx.cap)
        return narrow(widen(grad) * (1.0 - t * t), x.dtype), None


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """y of x (any shape), the size of every element below ``cap``."""
    if not needs_gradient(x):
        return narrow(capped(widen(x), cap) * cap, x.dtype)
    return record(_SoftCap, x, cap)
