"""Embedding: y[t] = weight[ids[t]], a copy of bits.

Gradient: the rows of dy of one id are added in ascending token order in fp32, beginning from 0, and rounded once. The
reference adds occurrence r of every id in one step, so no two additions of a step meet in a row and no atomic decides
the order; it takes as many steps as the commonest id has occurrences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from vime_core.numerics.arithmetic import narrow, widen
from vime_core.numerics.gradients import needs_gradient, record

if TYPE_CHECKING:
    from vime_core.numerics.kernels import Kernels


def reference_backward(grad: Tensor, ids: Tensor, rows: int) -> Tensor:
    """(rows, H) of ``grad``'s dtype from grad (T, H) and ids (T)."""
    unique, place, counts = cast(
        "tuple[Tensor, Tensor, Tensor]",
        cast("Any", torch).unique(ids, sorted=True, return_inverse=True, return_counts=True),
    )
    order = torch.argsort(place, stable=True)
    first = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    occurrence = torch.arange(len(order), device=ids.device) - first
    sums = torch.zeros(len(unique), grad.shape[-1], device=grad.device)
    for step in range(int(counts.max()) if len(order) else 0):
        tokens = order[occurrence == step]
        sums[place[tokens]] = sums[place[tokens]] + widen(grad[tokens])
    result = torch.zeros(rows, grad.shape[-1], dtype=grad.dtype, device=grad.device)
    result[unique] = narrow(sums, grad.dtype)
    return result


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernels: Kernels, ids: Tensor, weight: Tensor) -> Tensor:
        ctx.kernels = kernels
        ctx.save_for_backward(ids)
        ctx.rows = weight.shape[0]
        return weight[ids]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, Tensor]:
        (grad,) = grads
        (ids,) = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        return None, None, ctx.kernels.embedding_backward(rows, ids.reshape(-1), ctx.rows)


def embedding(kernels: Kernels, ids: Tensor, weight: Tensor) -> Tensor:
    """y (..., H) of ids (...) and weight (V, H). IndexError for an id outside the vocabulary."""
    return record(_Embedding, kernels, ids, weight) if needs_gradient(weight) else weight[ids]
