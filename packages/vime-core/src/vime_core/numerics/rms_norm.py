"""Residual add and RMSNorm.

    r = rn(x + residual)                          the residual stream; r = x where there is none
    s = 1 / sqrt(sum(r * r) / H + eps)            sum in lanes (arithmetic.lane_sum), products and sum rounded apart
    y = rn((r * s) * w)

The norm reads the *rounded* r, so recomputation and pipeline boundaries, which see r alone, change no bit. The same
definition over the head dimension is the QK-norm of Qwen3.

Gradient: with n = r * s, g = dy * w, c = lane_sum(g * n) / H:  dr = rn(s * (g - n * c) + dr_stream), which is the
gradient of x and of the residual alike; dw = rn(the rows of dy * n in ascending order).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vime_core.numerics.arithmetic import column_sum, lane_sum, narrow, sqrt, widen
from vime_core.numerics.gradients import needs_gradient, record

if TYPE_CHECKING:
    from vime_core.numerics.kernels import Kernels


def _inverse_rms(r: Tensor, eps: float) -> Tensor:
    size = torch.full_like(r[..., 0], float(r.shape[-1]))  # a tensor: CUDA divides by a scalar through its inverse
    return torch.reciprocal(sqrt(lane_sum(r * r) / size + eps)).unsqueeze(-1)


def reference(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(y, r), both (..., H) of x's dtype."""
    r = x if residual is None else narrow(widen(x) + widen(residual), x.dtype)
    wide = widen(r)
    return narrow(wide * _inverse_rms(wide, eps) * widen(weight), x.dtype), r


def reference_backward(
    grad: Tensor, grad_stream: Tensor | None, r: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(dr of r's dtype, dw (H) in fp32)."""
    wide, dy = widen(r), widen(grad)
    inverse = _inverse_rms(wide, eps)
    normed, scaled = wide * inverse, dy * widen(weight)
    size = torch.full_like(wide[..., 0], float(r.shape[-1]))
    mean = (lane_sum(scaled * normed) / size).unsqueeze(-1)
    dr = inverse * (scaled - normed * mean)
    dr = dr if grad_stream is None else dr + widen(grad_stream)
    return narrow(dr, r.dtype), column_sum((dy * normed).reshape(-1, r.shape[-1]))


class _AddRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kernels: Kernels, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        y, r = kernels.add_rms_norm(x, residual, weight, eps)
        ctx.kernels, ctx.eps = kernels, eps
        ctx.save_for_backward(r, weight)
        ctx.set_materialize_grads(False)
        return y, r

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad, grad_stream = grads
        r, weight = ctx.saved_tensors
        if grad is None:
            return None, grad_stream, grad_stream, None, None
        dr, dw = ctx.kernels.add_rms_norm_backward(grad, grad_stream, r, weight, ctx.eps)
        return None, dr, dr, dw.to(weight.dtype), None


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernels: Kernels, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.kernels, ctx.eps = kernels, eps
        ctx.save_for_backward(x, weight)
        return kernels.add_rms_norm(x, None, weight, eps)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        dx, dw = ctx.kernels.add_rms_norm_backward(grad, None, x, weight, ctx.eps)
        return None, dx, dw.to(weight.dtype), None


def rms_norm(kernels: Kernels, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y (..., H) of x (..., H) and weight (H), without a residual."""
    if not needs_gradient(x, weight):
        return kernels.add_rms_norm(x, None, weight, eps)[0]
    return record(_RmsNorm, kernels, x, weight, eps)


def add_rms_norm(kernels: Kernels, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(y, r): the normed and the residual stream, both (..., H), of x and residual (..., H) and weight (H)."""
    if not needs_gradient(x, residual, weight):
        return kernels.add_rms_norm(x, residual, weight, eps)
    return record(_AddRmsNorm, kernels, x, residual, weight, eps)


def residual_sum(kernels: Kernels, x: Tensor, residual: Tensor) -> Tensor:
    """r (..., H) of :func:`add_rms_norm`, of which no norm is wanted."""
    if kernels.adds_as_torch:
        return x + residual
    unused = torch.ones(x.shape[-1], dtype=x.dtype, device=x.device)
    return add_rms_norm(kernels, x, residual, unused, 1.0)[1]
