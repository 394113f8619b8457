"""Gradient of packed attention (:mod:`vime_core.numerics.attention`), without atomics.

dq: one program a tile of queries, over the key blocks ascending. dk and dv: one program a block of keys, over the heads
of the group, then the query blocks, ascending. Scores are recomputed; p = exp(t - lse); D = dot(dy, o).
"""

# Triton's language has no types.
# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vime_core.numerics.attention import AttentionSpec
from vime_core.numerics.cuda.attention import KEYS, WARPS, options, programs, score, sequence_of
from vime_core.numerics.cuda.launch import UNFUSED, remembered
from vime_core.numerics.cuda.sums import tree_sum


@remembered
@triton.jit
def row_dots(dy_ptr, o_ptr, d_ptr, dim, DIM: tl.constexpr):
    """D = dot(dy, o) of one head of one token."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, DIM)
    dy = tl.load(dy_ptr + row * dim + column, mask=column < dim, other=0.0).to(tl.float32)
    o = tl.load(o_ptr + row * dim + column, mask=column < dim, other=0.0).to(tl.float32)
    tl.store(d_ptr + row, tree_sum(dy * o))


@triton.jit
def weights_and_slopes(
    q, k, v, dy, lse, d, query, key, count, scale, window, cap,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """(p, dt * scale), both (queries, keys): the probabilities and the gradient of q k^T."""
    t = score(q, k, scale, cap, EXACT, CAPPED)
    visible = (key[None, :] <= query[:, None]) & (query < count)[:, None]
    if WINDOWED:
        visible = visible & (key[None, :] > query[:, None] - window)
    p = tl.where(visible, tl.exp(t - lse[:, None]), 0.0)
    dp = tl.dot(dy, tl.trans(v), input_precision="ieee") if EXACT else tl.dot(dy, tl.trans(v))
    slope = p * (dp - d[:, None])
    if CAPPED:
        bent = tl.div_rn(t, cap)
        slope = slope * (1.0 - bent * bent)
    return p, slope * scale


@remembered
@triton.jit
def query_gradient(
    q_ptr, k_ptr, v_ptr, dy_ptr, lse_ptr, d_ptr, dq_ptr, start_ptr, sequences, scale, window, cap, heads, kv_heads, dim,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, EXACT: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """dq of BLOCK queries of one head."""
    sequence = sequence_of(tl.program_id(0), start_ptr, sequences, BLOCK)
    first = tl.load(start_ptr + sequence)
    count = tl.load(start_ptr + sequence + 1) - first
    begin = (tl.program_id(0) - (first // BLOCK + sequence)) * BLOCK
    if begin >= count:
        return
    head = tl.program_id(1).to(tl.int64)
    kv_head = head // (heads // kv_heads)
    query, column = begin + tl.arange(0, BLOCK), tl.arange(0, DIM)
    row = (first + query).to(tl.int64) * heads + head
    mask = (query < count)[:, None] & (column < dim)[None, :]
    place = row[:, None] * dim + column[None, :]
    q, dy = tl.load(q_ptr + place, mask=mask, other=0.0), tl.load(dy_ptr + place, mask=mask, other=0.0)
    lse = tl.load(lse_ptr + row, mask=query < count, other=0.0)
    d = tl.load(d_ptr + row, mask=query < count, other=0.0)
    dq = tl.zeros([BLOCK, DIM], tl.float32)
    low = tl.maximum(begin - window + 1, 0) // BLOCK * BLOCK if WINDOWED else 0
    for start in range(low, tl.minimum(begin + BLOCK, count), BLOCK):
        key = start + tl.arange(0, BLOCK)
        source = ((first + key).to(tl.int64) * kv_heads + kv_head)[:, None] * dim + column[None, :]
        exists = (key < count)[:, None] & (column < dim)[None, :]
        k, v = tl.load(k_ptr + source, mask=exists, other=0.0), tl.load(v_ptr + source, mask=exists, other=0.0)
        _, slope = weights_and_slopes(
            q, k, v, dy, lse, d, query, key, count, scale, window, cap, WINDOWED, CAPPED, EXACT
        )
        dq = tl.dot(slope, k, dq, input_precision="ieee") if EXACT else tl.dot(slope.to(k.dtype), k, dq)
    tl.store(dq_ptr + place, dq.to(dq_ptr.dtype.element_ty), mask=mask)


@remembered
@triton.jit
def key_gradient(
    q_ptr, k_ptr, v_ptr, dy_ptr, lse_ptr, d_ptr, dk_ptr, dv_ptr, start_ptr, sequences, scale, window, cap, heads,
    kv_heads, dim,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, EXACT: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """dk and dv of BLOCK keys of one KV head."""
    sequence = sequence_of(tl.program_id(0), start_ptr, sequences, BLOCK)
    first = tl.load(start_ptr + sequence)
    count = tl.load(start_ptr + sequence + 1) - first
    begin = (tl.program_id(0) - (first // BLOCK + sequence)) * BLOCK
    if begin >= count:
        return
    kv_head = tl.program_id(1).to(tl.int64)
    group = heads // kv_heads
    key, column = begin + tl.arange(0, BLOCK), tl.arange(0, DIM)
    exists = (key < count)[:, None] & (column < dim)[None, :]
    target = ((first + key).to(tl.int64) * kv_heads + kv_head)[:, None] * dim + column[None, :]
    k, v = tl.load(k_ptr + target, mask=exists, other=0.0), tl.load(v_ptr + target, mask=exists, other=0.0)
    dk, dv = tl.zeros([BLOCK, DIM], tl.float32), tl.zeros([BLOCK, DIM], tl.float32)
    end = tl.minimum(begin + BLOCK + window, count) if WINDOWED else count
    for head in range(kv_head * group, (kv_head + 1) * group):
        for start in range(begin, end, BLOCK):
            query = start + tl.arange(0, BLOCK)
            row = (first + query).to(tl.int64) * heads + head
            mask = (query < count)[:, None] & (column < dim)[None, :]
            place = row[:, None] * dim + column[None, :]
            q, dy = tl.load(q_ptr + place, mask=mask, other=0.0), tl.load(dy_ptr + place, mask=mask, other=0.0)
            lse = tl.load(lse_ptr + row, mask=query < count, other=0.0)
            d = tl.load(d_ptr + row, mask=query < count, other=0.0)
            p, slope = weights_and_slopes(
                q, k, v, dy, lse, d, query, key, count, scale, window, cap, WINDOWED, CAPPED, EXACT
            )
            if EXACT:
                dv = tl.dot(tl.trans(p), dy, dv, input_precision="ieee")
                dk = tl.dot(tl.trans(slope), q, dk, input_precision="ieee")
            else:
                dv = tl.dot(tl.trans(p.to(dy.dtype)), dy, dv)
                dk = tl.dot(tl.trans(slope.to(q.dtype)), q, dk)
    tl.store(dk_ptr + target, dk.to(dk_ptr.dtype.element_ty), mask=exists)
    tl.store(dv_ptr + target, dv.to(dv_ptr.dtype.element_ty), mask=exists)


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, cu_seqlens: Tensor, spec: AttentionSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of the dtypes of q, k and v, from grad (T, heads, dim) and what the forward returned."""
    grad, q, k, v, o, lse = (t.contiguous() for t in (grad, q, k, v, o, lse))
    dq, dk, dv, d = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), torch.empty_like(lse)
    (tokens, heads, dim), kv_heads, sequences = q.shape, k.shape[1], cu_seqlens.shape[0] - 1
    if not tokens:
        return dq, dk, dv
    chosen = options(spec, q.dtype, dim)
    row_dots[(tokens * heads,)](grad, o, d, dim, DIM=chosen["DIM"], num_warps=1, **UNFUSED)
    shape = (cu_seqlens, sequences, spec.scale, spec.window or 0, spec.soft_cap or 0.0, heads, kv_heads, dim)
    tiles = programs(tokens, sequences, KEYS)
    query_gradient[(tiles, heads)](q, k, v, grad, lse, d, dq, *shape, **chosen, num_warps=WARPS)
    key_gradient[(tiles, kv_heads)](q, k, v, grad, lse, d, dk, dv, *shape, **chosen, num_warps=WARPS)
    return dq, dk, dv
