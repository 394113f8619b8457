"""Routed experts: for each (token, slot) route, fc2(SwiGLU(fc1(x))) of its expert, by the block-FP8 linear.

Rows of one expert are computed together, in (token, slot) order; the linear is row-invariant, so grouping, padding and
empty experts change no bit. The route's weight is applied at the combine, not here.

Gradient, straight through the quantisations on masters and inputs: fc1 is recomputed by the dense linear on the master
weight, g; h = SwiGLU(g); dW2 = linear(dy^T, h^T), dg from SwiGLU's gradient at g, dW1 = linear(dg^T, x^T). A token's dx
is the sum over its slots ascending, in fp32, rounded once. Expert by expert or grouped: the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vime_core.numerics.arithmetic import narrow, widen
from vime_core.numerics.gradients import needs_gradient, record
from vime_glm5.numerics import block_linear
from vime_glm5.numerics.e4m3 import BlockWeight

if TYPE_CHECKING:
    from vime_glm5.numerics.operations import Glm5Operations

Weights = Sequence[Tensor] | Sequence[BlockWeight]


def routes_of(experts: Tensor, expert: int) -> tuple[Tensor, Tensor]:
    """(tokens, slots) of an expert's routes, ascending, of the choice (T, k)."""
    tokens, slots = torch.where(experts == expert)
    return tokens, slots


def _run(ops: Glm5Operations, x: Tensor, experts: Tensor, fc1: Weights, fc2: Weights) -> Tensor:
    rows = torch.zeros(*experts.shape, x.shape[1], dtype=x.dtype, device=x.device)
    for expert, (first, second) in enumerate(zip(fc1, fc2, strict=True)):
        tokens, slots = routes_of(experts, expert)
        if len(tokens):
            rows[tokens, slots] = one_expert(ops, x[tokens], first, second)
    return rows


def one_expert(ops: Glm5Operations, x: Tensor, fc1: Tensor | BlockWeight, fc2: Tensor | BlockWeight) -> Tensor:
    """(n, H) of the rows x (n, H) of one expert, without a gradient."""
    first = fc1 if isinstance(fc1, BlockWeight) else ops.glm.quantise_weight(fc1, 2)
    second = fc2 if isinstance(fc2, BlockWeight) else ops.glm.quantise_weight(fc2, 1)
    return ops.glm.block_linear(ops.kernels.swiglu(ops.glm.block_linear(x, first)), second)


def expert_gradients(
    ops: Glm5Operations, grad: Tensor, x: Tensor, fc1: Tensor, fc2: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx (n, H), dW1, dW2) of one expert's rows."""
    kernels = ops.kernels
    gate_up = kernels.linear(x, fc1, None, kernels.chunk_count(*fc1.shape), False)
    dh, second = block_linear.gradients(ops, grad, kernels.swiglu(gate_up), fc2)
    dx, first = block_linear.gradients(ops, kernels.swiglu_backward(dh, gate_up), x, fc1)
    return dx, first, second


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ops: Glm5Operations, x: Tensor, experts: Tensor, *weights: Tensor) -> Tensor:
        ctx.ops = ops
        ctx.save_for_backward(x, experts, *weights)
        half = len(weights) // 2
        return _run(ops, x, experts, weights[:half], weights[half:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, experts, *weights = ctx.saved_tensors
        half, drows = len(weights) // 2, torch.zeros_like(grads[0])
        found = [torch.zeros_like(weight) for weight in weights]
        for expert in range(half):
            tokens, slots = routes_of(experts, expert)
            if len(tokens):
                parts = expert_gradients(
                    ctx.ops, grads[0][tokens, slots], x[tokens], weights[expert], weights[half + expert]
                )
                drows[tokens, slots], found[expert], found[half + expert] = parts
        return None, over_slots(drows), None, *found


def over_slots(rows: Tensor) -> Tensor:
    """(T, H): the rows (T, k, H) added in slot order in fp32, rounded once."""
    total = torch.zeros(rows.shape[0], rows.shape[2], device=rows.device)
    for slot in range(rows.shape[1]):
        total = total + widen(rows[:, slot])
    return narrow(total, rows.dtype)


def run_experts(ops: Glm5Operations, x: Tensor, experts: Tensor, fc1: Weights, fc2: Weights) -> Tensor:
    """rows (T, k, H): each route's row.

    Args:
        ops: the operations.
        x: (T, H).
        experts: int64 (T, k), the choice; an index outside of the weights belongs to nobody here, its row is zero.
        fc1: for each expert [gate | up] (2F, H), master or quantised.
        fc2: for each expert (H, F), master or quantised.
    """
    masters = [weight for weight in (*fc1, *fc2) if isinstance(weight, Tensor)]
    if not needs_gradient(x, *masters):
        return _run(ops, x, experts, fc1, fc2)
    return record(_Experts, ops, x, experts, *masters)
