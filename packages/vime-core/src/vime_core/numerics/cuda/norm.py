"""RMSNorm with its residual, and sums over rows (:mod:`vime_core.numerics.rms_norm`); one program a row.

The sum over a row is a tree over its padded length (:mod:`vime_core.numerics.cuda.sums`), which depends on H only.
"""

# Triton's language has no types.
# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vime_core.numerics.cuda.launch import UNFUSED, remembered
from vime_core.numerics.cuda.sizes import parts, power_of_2
from vime_core.numerics.cuda.sums import tree_sum

SUM_ROWS = 256  # rows that one program of a column sum adds; partial sums are added in ascending order


@triton.jit
def inverse_rms(r, size, eps):
    """1 / sqrt(mean square + eps), every step rounded by IEEE 754."""
    mean = tl.div_rn(tree_sum(r * r), size.to(tl.float32))
    return tl.div_rn(1.0, tl.sqrt_rn(mean + eps))


@remembered
@triton.jit
def forward(
    x_ptr, residual_ptr, w_ptr, y_ptr, r_ptr, size, eps, heads, x_token, x_head,
    HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row of y and of the rounded residual stream r, which is what the norm reads; a token has ``heads`` rows."""
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    mask, place = column < size, row.to(tl.int64) * size + column
    source = x_ptr + (row // heads).to(tl.int64) * x_token + (row % heads).to(tl.int64) * x_head
    r = tl.load(source + column, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        r += tl.load(residual_ptr + place, mask=mask, other=0.0).to(tl.float32)
        rounded = r.to(r_ptr.dtype.element_ty)
        tl.store(r_ptr + place, rounded, mask=mask)
        r = rounded.to(tl.float32)
    w = tl.load(w_ptr + column, mask=mask, other=0.0).to(tl.float32)
    y = (r * inverse_rms(r, size, eps)) * w
    tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask=mask)


@remembered
@triton.jit
def backward(
    dy_ptr, stream_ptr, r_ptr, w_ptr, dr_ptr, product_ptr, size, eps, HAS_STREAM: tl.constexpr, BLOCK: tl.constexpr
):
    """A row of dr, and of dy * n, whose sum over the rows is dw."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    mask, place = column < size, row * size + column
    r = tl.load(r_ptr + place, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + place, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + column, mask=mask, other=0.0).to(tl.float32)
    inverse = inverse_rms(r, size, eps)
    n, g = r * inverse, dy * w
    dr = inverse * (g - n * tl.div_rn(tree_sum(g * n), size.to(tl.float32)))
    if HAS_STREAM:
        dr += tl.load(stream_ptr + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(dr_ptr + place, dr.to(dr_ptr.dtype.element_ty), mask=mask)
    tl.store(product_ptr + place, dy * n, mask=mask)


@remembered
@triton.jit
def rows_sum(x_ptr, y_ptr, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The sum, ascending, of ROWS rows of x for BLOCK columns."""
    part, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for row in range(part * ROWS, tl.minimum((part + 1) * ROWS, rows)):
        total += tl.load(x_ptr + row * columns + column, mask=column < columns, other=0.0).to(tl.float32)
    tl.store(y_ptr + part * columns + column, total, mask=column < columns)


def _warps(block: int) -> int:
    return max(1, min(16, block // 256))


def _by_rows(x: Tensor) -> tuple[Tensor, int, int, int]:
    """x, rows of a token, strides of tokens and rows: heads of a projection are read where they lie."""
    if x.dim() == 3 and x.stride(2) == 1:
        return x, x.shape[1], x.stride(0), x.stride(1)
    return x.contiguous(), 1, x.shape[-1], 0


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(y, r), both (..., H) of x's dtype."""
    x, *rows = _by_rows(x)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    r = x if residual is None else torch.empty_like(y)
    size, block = x.shape[-1], power_of_2(x.shape[-1])
    if x.numel():
        forward[(x.numel() // size,)](
            x, None if residual is None else residual.contiguous(), weight, y, r, size, eps, *rows,
            HAS_RESIDUAL=residual is not None, BLOCK=block, num_warps=_warps(block), **UNFUSED,
        )  # fmt: skip
    return y, r


def add_rms_norm_backward(
    grad: Tensor, grad_stream: Tensor | None, r: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(dr of r's dtype, dw (H) in fp32)."""
    r = r.contiguous()
    dr, products = torch.empty_like(r), torch.empty_like(r, dtype=torch.float32)
    size, block = r.shape[-1], power_of_2(r.shape[-1])
    if r.numel():
        backward[(r.numel() // size,)](
            grad.contiguous(), None if grad_stream is None else grad_stream.contiguous(), r, weight, dr, products,
            size, eps, HAS_STREAM=grad_stream is not None, BLOCK=block, num_warps=_warps(block), **UNFUSED,
        )  # fmt: skip
    return dr, column_sum(products.reshape(-1, size))


def column_sum(x: Tensor) -> Tensor:
    """The rows of x (M, K) added in ascending order within parts of 256, then the parts: (K) in fp32."""
    x, (rows, columns) = x.contiguous(), x.shape
    while rows > 1 or x.dtype != torch.float32:
        count = parts(rows, SUM_ROWS)
        sums = torch.empty(count, columns, dtype=torch.float32, device=x.device)
        rows_sum[(count, parts(columns, 128))](x, sums, rows, columns, ROWS=SUM_ROWS, BLOCK=128, num_warps=1)
        x, rows = sums, count
    return x[0] if rows else torch.zeros(columns, device=x.device)
