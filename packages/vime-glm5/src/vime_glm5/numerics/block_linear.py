"""Block-FP8 linear: y = rn(sum over blocks b of K, ascending, of (fp32(dot_b) * sx[m, b]) * sw[n_block, b]).

dot_b is the exact dot product of 128 e4m3 numbers each (:mod:`.e4m3`): products are multiples of 2^-18 below 2^18, so a
sum of 128 needs 43 bits. The reference takes it in fp64, where every order of summation gives it exactly; any tensor
core that keeps it exact agrees. Nothing depends on another row or on M.

Gradient, straight through both quantisations: dx = linear(dy, w^T) and dw = linear(dy^T, x^T) of the dense contract, on
the master weight w and the input x themselves.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vime_core.numerics.arithmetic import flush, narrow
from vime_core.numerics.gradients import needs_gradient, record
from vime_core.numerics.linear import input_gradient, weight_gradient
from vime_glm5.numerics.e4m3 import BLOCK, BlockWeight, padded, quantise_groups

if TYPE_CHECKING:
    from vime_glm5.numerics.operations import Glm5Operations


def reference(x: Tensor, held: BlockWeight) -> Tensor:
    """y (..., N) in x's dtype, of x (..., K) and a quantised weight (N, K)."""
    rows = x.reshape(-1, x.shape[-1])
    q, scales = quantise_groups(rows)
    n = held.q.shape[0]
    weights = padded(held.q.double(), 1, BLOCK).unflatten(-1, (-1, BLOCK))
    dots = torch.bmm(q.double().transpose(0, 1), weights.permute(1, 2, 0)).float()
    columns = held.row_scales()
    total = torch.zeros(len(rows), n, device=x.device)
    for block, dot in enumerate(dots.unbind(0)):
        total = total + flush((dot * scales[:, block, None]) * columns[:, block])
    return narrow(total, x.dtype).reshape(*x.shape[:-1], n)


def gradients(ops: Glm5Operations, grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """(dx, dw) of dy (M, N), x (M, K) and the master weight (N, K)."""
    return input_gradient(ops.kernels, grad, weight), weight_gradient(ops.kernels, grad, x)


class _BlockLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ops: Glm5Operations, x: Tensor, weight: Tensor, parts: int) -> Tensor:
        ctx.ops = ops
        ctx.save_for_backward(x, weight)
        return ops.glm.block_linear(x, ops.glm.quantise_weight(weight, parts))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grads[0].reshape(-1, weight.shape[0]).contiguous()
        dx, dw = gradients(ctx.ops, grad, x.reshape(-1, weight.shape[1]), weight)
        return None, dx.reshape(x.shape), dw, None


def block_linear(ops: Glm5Operations, x: Tensor, weight: Tensor | BlockWeight, parts: int = 1) -> Tensor:
    """y (..., N) of x (..., K) and a weight (N, K): the master, quantised here, or what was quantised before.

    ``parts``: how many projections the master stacks.
    """
    if isinstance(weight, BlockWeight):
        return ops.glm.block_linear(x, weight)
    if not needs_gradient(x, weight):
        return ops.glm.block_linear(x, ops.glm.quantise_weight(weight, parts))
    return record(_BlockLinear, ops, x, weight, parts)
