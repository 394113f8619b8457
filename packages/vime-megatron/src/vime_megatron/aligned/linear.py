"""The contract's linear with a faster weight gradient.

Forward, input gradient and bias gradient are the operation's. The weight gradient is torch's matrix product: it is no
row of anything that the engine computes, so it has to be the same in every run, not the same in every batch. Its bits
may differ between machines and numbers of threads; a train step of a 135M model takes a fifth less time.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vime_core.numerics import Operations
from vime_core.numerics.linear import input_gradient
from vime_megatron.autograd import apply


def linear(operations: Operations, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`Operations.linear`: y [..., N] of x [..., K], weight [N, K] and bias [N], all of one dtype."""
    return apply(_Linear, operations, x, weight, bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, operations: Operations, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.kernels = operations.kernels
        ctx.save_for_backward(x, weight)
        return operations.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        _, needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        grad_rows = grads[0].reshape(-1, weight.shape[0])
        return (
            None,
            input_gradient(ctx.kernels, grads[0], weight) if needs_x else None,
            grad_rows.t().mm(x.reshape(-1, weight.shape[1])) if needs_weight else None,
            ctx.kernels.column_sum(grad_rows).to(weight.dtype) if needs_bias else None,
        )
