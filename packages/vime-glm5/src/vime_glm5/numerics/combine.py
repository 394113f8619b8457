"""The combine: every (token, slot) route keeps its own row until the token's owner reduces, in slot order.

    acc = fma(fp32(row_i), weight_i, acc) over slots i ascending from 0;   routed = rn(acc)
    out = rn(fp32(shared) + factor * fp32(routed))

Where an expert ran changes no bit, and no partial sum ever crosses ranks. Gradient: d routed = rn(factor * dout);
d row_i = rn(weight_i * d routed), one writer a route; d weight_i = dot(d routed, row_i) in lanes
(vime_core.numerics.arithmetic.lane_dot); d shared = dout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vime_core.numerics.arithmetic import fma, lane_dot, narrow, widen
from vime_core.numerics.gradients import needs_gradient, record

if TYPE_CHECKING:
    from vime_glm5.numerics.operations import Glm5Operations


def reference(rows: Tensor, weights: Tensor) -> Tensor:
    """routed (T, H) of rows (T, k, H) and weights fp32 (T, k)."""
    total = torch.zeros(rows.shape[0], rows.shape[2], device=rows.device)
    for slot in range(rows.shape[1]):
        total = fma(widen(rows[:, slot]), weights[:, slot, None], total)
    return narrow(total, rows.dtype)


def add_shared(routed: Tensor, shared: Tensor, factor: float) -> Tensor:
    """out (T, H) of routed and shared (T, H)."""
    return narrow(widen(shared) + widen(routed) * factor, shared.dtype)


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ops: Glm5Operations, rows: Tensor, weights: Tensor, shared: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        ctx.save_for_backward(rows, weights)
        return ops.glm.add_shared(ops.glm.combine(rows, weights), shared, factor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        rows, weights = ctx.saved_tensors
        routed = narrow(widen(grad) * ctx.factor, grad.dtype)
        drows = narrow(widen(routed).unsqueeze(1) * weights.unsqueeze(-1), rows.dtype)
        return None, drows, lane_dot(routed.unsqueeze(1), rows), grad, None


def combine(ops: Glm5Operations, rows: Tensor, weights: Tensor, shared: Tensor, factor: float) -> Tensor:
    """out (T, H) of rows (T, k, H), weights fp32 (T, k) and the shared expert's output (T, H)."""
    if not needs_gradient(rows, weights, shared):
        return ops.glm.add_shared(ops.glm.combine(rows, weights), shared, factor)
    return record(_Combine, ops, rows, weights, shared, factor)
