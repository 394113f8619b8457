"""Linear on a GPU: one chain over K in ascending steps, for every M (:mod:`vime_core.numerics.linear`).

On Hopper every tile that :mod:`.tiles` chooses compiles to the same tensor-core instruction, whose fp32 accumulation
over ascending K is one definition whatever the tile and however an operand is stored (docs/probes-h200.md, section 2).
"""

# Triton's language has no types.
# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from vime_core.numerics.cuda.launch import remembered
from vime_core.numerics.cuda.sizes import parts
from vime_core.numerics.cuda.tiles import PROGRAMS, Tile, few_rows, many_rows, plain
from vime_core.numerics.linear import rows_of

_GROUP = 8  # row blocks that share their columns in the cache
_BYTES = 16  # what the tensor copy engine wants addresses and strides to be multiples of


@remembered
@triton.jit(do_not_specialize=["rows"])
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


@remembered
@triton.jit(do_not_specialize=["rows", "depth"])
def walked(
    x_desc, w_desc, bias_ptr, y_ptr, rows, columns, depth,
    HAS_BIAS: tl.constexpr, X_TURNED: tl.constexpr, W_TURNED: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """The tiles of one program, in turn; a turned operand is read as it is stored, with K along its rows."""
    tiles_m, tiles_n = tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=True):
        first = tile // (GROUP * tiles_n) * GROUP
        high = tl.minimum(tiles_m - first, GROUP)
        m, n = first + tile % (GROUP * tiles_n) % high, tile % (GROUP * tiles_n) // high
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, depth, BLOCK_K):
            x = x_desc.load([start, m * BLOCK_M]).T if X_TURNED else x_desc.load([m * BLOCK_M, start])
            w = w_desc.load([start, n * BLOCK_N]) if W_TURNED else w_desc.load([n * BLOCK_N, start]).T
            total = tl.dot(x, w, total)
        row = m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        column = n * BLOCK_N + tl.arange(0, BLOCK_N)
        if HAS_BIAS:
            total += tl.load(bias_ptr + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
        mask = (row < rows)[:, None] & (column < columns)[None, :]
        tl.store(y_ptr + row[:, None] * columns + column[None, :], total.to(y_ptr.dtype.element_ty), mask=mask)


def chunk_count(n: int, k: int) -> int:
    """One chain for every (N, K)."""
    del n, k
    return 1


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, chunks: int, wide: bool) -> Tensor:
    """y (..., N) of x (..., K), weight (N, K) and bias (N); fp32 when ``wide``. Transposed views are not copied."""
    if chunks != 1:
        raise ValueError(f"provider 'cuda' defines one chain over K, not {chunks} chunks")
    rows = rows_of(x)
    count, columns = rows.shape[0], weight.shape[0]
    y = torch.empty(count, columns, dtype=torch.float32 if wide else x.dtype, device=x.device)
    if count and columns:
        if x.dtype != torch.bfloat16:
            _product(rows, weight, bias, y, plain(exact=True))
        elif count <= (few := few_rows(columns)).rows:
            _product(rows, weight, bias, y, few)
        elif _described(rows) and _described(weight):
            _walked(rows, weight, bias, y, many_rows(count, columns, wide=wide))
        else:
            _product(rows, weight, bias, y, plain(exact=False))
    return y if x.dim() == 2 else y.reshape(*x.shape[:-1], columns)


def linear_partials(x: Tensor, weight: Tensor, chunks: int) -> Tensor:
    """The one chunk sum (1, ..., N) in fp32."""
    return linear(x, weight, None, chunks, wide=True).unsqueeze(0)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, tile: Tile) -> None:
    x, weight, (rows, columns) = x.contiguous(), weight.contiguous(), y.shape
    product[(parts(rows, tile.rows), parts(columns, tile.columns))](
        x, weight, bias, y, rows, columns, x.shape[1], x.stride(0), weight.stride(0), HAS_BIAS=bias is not None,
        EXACT=x.dtype != torch.bfloat16, BLOCK_M=tile.rows, BLOCK_N=tile.columns, BLOCK_K=tile.depth,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _walked(x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, tile: Tile) -> None:
    rows, columns = y.shape
    programs = min(PROGRAMS, parts(rows, tile.rows) * parts(columns, tile.columns))
    walked[(programs,)](
        _descriptor(x, tile.rows, tile.depth), _descriptor(weight, tile.columns, tile.depth), bias, y, rows, columns,
        x.shape[1], HAS_BIAS=bias is not None, X_TURNED=_turned(x), W_TURNED=_turned(weight), BLOCK_M=tile.rows,
        BLOCK_N=tile.columns, BLOCK_K=tile.depth, GROUP=_GROUP, PROGRAMS=PROGRAMS, num_warps=tile.warps,
        num_stages=tile.stages,
    )  # fmt: skip


def _turned(matrix: Tensor) -> bool:
    """Whether K lies along the rows of what is stored."""
    return matrix.stride(1) != 1


def _described(matrix: Tensor) -> bool:
    """Whether the tensor copy engine can read it as it is stored."""
    strides = matrix.stride()
    if 1 not in strides:
        return False
    return (max(strides) * matrix.element_size()) % _BYTES == 0 and matrix.data_ptr() % _BYTES == 0


def _descriptor(matrix: Tensor, rows: int, depth: int) -> TensorDescriptor:
    if _turned(matrix):
        return TensorDescriptor.from_tensor(matrix.t(), [depth, rows])
    return TensorDescriptor.from_tensor(matrix, [rows, depth])
