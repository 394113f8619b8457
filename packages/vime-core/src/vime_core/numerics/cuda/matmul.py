"""Linear on a GPU: one chain over K in ascending steps of 64, for every M (:mod:`vime_core.numerics.linear`).

A tile's rows and columns are fixed by dtype; on Hopper both tiles compile to the same tensor-core instruction, whose
fp32 accumulation over ascending K is one definition whatever the tile (docs/probes-h200.md, section 2).
"""

# Triton's language has no types.
# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_STEP = 64


@triton.jit
def product(
    x_ptr, w_ptr, bias_ptr, y_ptr, rows, columns, depth, x_row, w_row,
    HAS_BIAS: tl.constexpr, EXACT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile of y = x w^T + bias; EXACT: fp32 by fused multiply-adds, never TF32."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, depth, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x_mask = (row < rows)[:, None] & (k < depth)[None, :]
        w_mask = (column < columns)[None, :] & (k < depth)[:, None]
        x = tl.load(x_ptr + row[:, None] * x_row + k[None, :], mask=x_mask, other=0.0)
        w = tl.load(w_ptr + column[None, :] * w_row + k[:, None], mask=w_mask, other=0.0)
        total = tl.dot(x, w, total, input_precision="ieee") if EXACT else tl.dot(x, w, total)
    if HAS_BIAS:
        total += tl.load(bias_ptr + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(y_ptr + row[:, None] * columns + column[None, :], total.to(y_ptr.dtype.element_ty), mask=mask)


def tile(dtype: torch.dtype, rows: int) -> tuple[int, int, int]:
    """(rows, columns, warps) of a tile. fp32 has one: nothing was measured about its tiles' equality."""
    if dtype != torch.bfloat16:
        return 64, 64, 4
    return (64, 64, 4) if rows <= 64 else (128, 128, 8)


def chunk_count(n: int, k: int) -> int:
    """One chain for every (N, K)."""
    del n, k
    return 1


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, chunks: int, wide: bool) -> Tensor:
    """y (..., N) of x (..., K), weight (N, K) and bias (N); fp32 when ``wide``."""
    if chunks != 1:
        raise ValueError(f"provider 'cuda' defines one chain over K, not {chunks} chunks")
    rows, weight = x.reshape(-1, x.shape[-1]).contiguous(), weight.contiguous()
    y = torch.empty(len(rows), len(weight), dtype=torch.float32 if wide else x.dtype, device=x.device)
    if y.numel():
        block_m, block_n, warps = tile(x.dtype, len(rows))
        grid = (triton.cdiv(y.shape[0], block_m), triton.cdiv(y.shape[1], block_n))
        product[grid](
            rows, weight, bias, y, *y.shape, rows.shape[1], rows.stride(0), weight.stride(0),
            HAS_BIAS=bias is not None, EXACT=x.dtype != torch.bfloat16, BLOCK_M=block_m, BLOCK_N=block_n,
            BLOCK_K=_STEP, num_warps=warps, num_stages=3,
        )  # fmt: skip
    return y.reshape(*x.shape[:-1], -1)


def linear_partials(x: Tensor, weight: Tensor, chunks: int) -> Tensor:
    """The one chunk sum (1, ..., N) in fp32."""
    return linear(x, weight, None, chunks, wide=True).unsqueeze(0)
