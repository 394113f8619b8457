"""Linear: y = rn(D + b), D the ordered sum of the dot products of C equal chunks of K.

    D[m, n] = ((d_0 + d_1) + d_2) + ...,  d_c = dot(x[m, chunk c], w[n, chunk c])        all in fp32
    y[m, n] = rn(D[m, n] + b[n])

- C is the provider's rule of the *global* (N, K) and of nothing else (part of its digest), so neither the batch nor
  the split of the output over tensor-parallel ranks can change a bit. A provider may compute chunks side by side (few
  rows) or walk them in one block (many rows). A tensor-parallel shard of K is a whole number of chunks: ranks exchange
  the fp32 chunk sums (``linear_partials``) and everybody adds them in ascending order (:func:`sum_partials`).
- Inside a chunk the order belongs to the provider and is part of its digest. ``reference`` and ``cpu`` share one:
  :func:`vime_core.numerics.arithmetic.lane_dot`, sixteen lanes across K and a tree.
- Gradients are the same operation: dx = linear(dy, w^T), dw = linear(dy^T, x^T), db = the rows of dy in ascending
  order; each is rounded once to the dtype of what it is the gradient of.

Why lanes across K: few rows stream the weight as it lies, and nothing has to be packed that could go stale. Measured on
one Zen 4 core in bf16, (N, K) = (49152, 576), against oneDNN with a prepacked weight: 2.2 and 3.8 ms at M = 1; 6.8 and
5.9 at M = 16. With many rows, or operands that lie by columns as those of gradients do, ``cpu`` packs both within the
call, so that lanes lie apart and the tree adds whole registers: the same sums, about as fast as oneDNN.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vime_core.numerics.arithmetic import column_sum, lane_dot, narrow, widen
from vime_core.numerics.gradients import needs_gradient, record

if TYPE_CHECKING:
    from vime_core.numerics.kernels import Kernels

MOST_CHUNKS = 8
SHORTEST_CHUNK = 512
CHUNK_MULTIPLE = 64  # elements; two K steps of a bf16 tensor-core tile
_REFERENCE_BYTES = 1 << 26  # how much the reference keeps in lanes at a time


def chunk_count(n: int, k: int) -> int:
    """C of ``reference`` and ``cpu``: the most of 8, 4, 2 whose chunks are at least 512 long and multiples of 64."""
    del n  # another provider's rule may use it
    count = MOST_CHUNKS
    while count > 1 and (k % (count * CHUNK_MULTIPLE) or k // count < SHORTEST_CHUNK):
        count //= 2
    return count


def sum_partials(partials: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """y of all chunk sums ``partials`` (C, ..., N) in fp32, added in ascending order, and the bias (N)."""
    total = partials[0]
    for chunk in partials[1:]:
        total = total + chunk
    return narrow(total if bias is None else total + widen(bias), dtype)


def reference_partials(x: Tensor, weight: Tensor, chunks: int) -> Tensor:
    """The chunk sums (C, ..., N) in fp32 of x (..., K) and weight (N, K)."""
    rows = x.reshape(-1, 1, x.shape[-1])
    step = max(1, _REFERENCE_BYTES // (64 * max(1, weight.shape[0])))
    sums = [
        torch.cat([lane_dot(part, w[None]) for part in torch.split(chunk, step)])
        for chunk, w in zip(rows.chunk(chunks, -1), weight.chunk(chunks, -1), strict=True)
    ]
    return torch.stack(sums).reshape(chunks, *x.shape[:-1], weight.shape[0])


def reference(x: Tensor, weight: Tensor, bias: Tensor | None, chunks: int, wide: bool) -> Tensor:
    """y (..., N); in fp32 when ``wide``."""
    return sum_partials(reference_partials(x, weight, chunks), bias, torch.float32 if wide else x.dtype)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernels: Kernels, x: Tensor, weight: Tensor, bias: Tensor | None, chunks: int) -> Tensor:
        ctx.kernels, ctx.has_bias = kernels, bias is not None
        ctx.save_for_backward(x, weight)
        return kernels.linear(x, weight, bias, chunks, False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        kernels: Kernels = ctx.kernels
        _, needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        grad_rows = rows_of(grad)
        return (
            None,
            input_gradient(kernels, grad, weight) if needs_x else None,
            weight_gradient(kernels, grad_rows, rows_of(x)) if needs_weight else None,
            kernels.column_sum(grad_rows).to(grad.dtype) if needs_bias and ctx.has_bias else None,
            None,
        )


def rows_of(x: Tensor) -> Tensor:
    """x (..., K) as (M, K); a matrix is itself, because even a view of it takes the host's time."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def input_gradient(kernels: Kernels, grad: Tensor, weight: Tensor) -> Tensor:
    """dx (..., K) = dy (..., N) times weight (N, K), as a linear over the chunks of N."""
    return kernels.linear(grad, weight.t(), None, kernels.chunk_count(*weight.shape[::-1]), False)


def weight_gradient(kernels: Kernels, grad: Tensor, x: Tensor, *, wide: bool = False) -> Tensor:
    """dw (N, K) of dy (M, N) and x (M, K), as a linear over the chunks of the rows; fp32 when ``wide``."""
    chunks = kernels.chunk_count(x.shape[1], x.shape[0])
    return kernels.linear(grad.t(), x.t(), None, chunks, wide)


def linear(
    kernels: Kernels, x: Tensor, weight: Tensor, bias: Tensor | None = None, chunks: int | None = None
) -> Tensor:
    """y (..., N) of x (..., K), weight (N, K) and bias (N), all of one dtype; ``chunks`` if it is a shard."""
    count = kernels.chunk_count(*weight.shape) if chunks is None else chunks
    if not needs_gradient(x, weight, bias):
        return kernels.linear(x, weight, bias, count, False)
    return record(_Linear, kernels, x, weight, bias, count)


def reference_column_sum(x: Tensor) -> Tensor:
    """The rows of x (M, K), widened, added in ascending order: (K) in fp32."""
    return column_sum(widen(x))
