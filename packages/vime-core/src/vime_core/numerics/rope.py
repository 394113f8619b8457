"""Rotary position embedding, in two definitions: ``neox`` (first and second half) and ``interleaved`` (neighbours).

    a' = rn(a * cos - b * sin),  b' = rn(b * cos + a * sin)       in fp32, products and sums rounded apart

for the pairs (a, b) = (x[i], x[i + R/2]) or (x[2i], x[2i + 1]), i < R/2, of the first R elements of a head; the rest
passes through. R is the width of the table (:mod:`vime_core.numerics.rope_table`). The gradient turns the other way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vime_core.numerics.arithmetic import narrow, widen
from vime_core.numerics.gradients import needs_gradient, record

if TYPE_CHECKING:
    from vime_core.numerics.kernels import Kernels


def reference(x: Tensor, positions: Tensor, table: Tensor, interleaved: bool, inverse: bool) -> Tensor:
    """The turned x (T, heads, dim); positions (T); table (P, R) in fp32; ``inverse`` turns back."""
    rotary = table.shape[1]
    cosines, sines = table[positions].unsqueeze(1).chunk(2, -1)
    sines = -sines if inverse else sines
    turning, rest = widen(x[..., :rotary]), x[..., rotary:]
    a, b = (turning[..., ::2], turning[..., 1::2]) if interleaved else turning.chunk(2, -1)
    pair = (a * cosines - b * sines, b * cosines + a * sines)
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([narrow(turned, x.dtype), rest], -1)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernels: Kernels, x: Tensor, positions: Tensor, table: Tensor, interleaved: bool) -> Tensor:
        ctx.kernels, ctx.interleaved = kernels, interleaved
        ctx.save_for_backward(positions, table)
        return kernels.rope(x, positions, table, interleaved, False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        positions, table = ctx.saved_tensors
        turned = ctx.kernels.rope(grad.contiguous(), positions, table, ctx.interleaved, True)
        return None, turned, None, None, None


def rope(kernels: Kernels, x: Tensor, positions: Tensor, table: Tensor, interleaved: bool = False) -> Tensor:
    """x (T, heads, dim) turned to ``positions`` (T); the last two dimensions of x are contiguous."""
    if not needs_gradient(x):
        return kernels.rope(x, positions, table, interleaved, False)
    return record(_Rope, kernels, x, positions, table, interleaved)
