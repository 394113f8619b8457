"""Attention forward, packed and paged (:mod:`vime_core.numerics.attention`): one walk over blocks of 64 keys.

A program holds the queries of one KV head's group and walks the key blocks from an absolute multiple of 64 upward.
A block without a visible key leaves a query's state as it was, bit for bit (weights 0, factor 1), so a query's result
depends on its own visible keys only. Programs are found from the query starts on the device: nothing waits for the
host, and decode graphs capture the call.
"""

# Triton's language has no types.
# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vime_core.numerics.attention import AttentionSpec, KvCache, PagedBatch
from vime_core.numerics.cuda.launch import remembered
from vime_core.numerics.cuda.sizes import power_of_2

KEYS = 64  # of a block
ROWS = 64  # of a tile: one tensor-core instruction of four warps, in prefill and in decode
WARPS = 4
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def sequence_of(program, start_ptr, sequences, SIZE: tl.constexpr):
    """The last sequence whose first program is not after ``program``: sequence s starts at start_s // SIZE + s."""
    low, high = 0, sequences
    while high - low > 1:
        middle = (low + high) // 2
        begins = tl.load(start_ptr + middle) // SIZE + middle
        low = tl.where(begins <= program, middle, low)
        high = tl.where(begins <= program, high, middle)
    return low


@triton.jit
def tanh(x):
    """tanh x = sign(x) (1 - 2 / (e^2|x| + 1))."""
    size = 1.0 - tl.div_rn(2.0, tl.exp(2.0 * tl.abs(x)) + 1.0)
    return tl.where(x < 0, -size, size)


@triton.jit
def score(q, k, scale, cap, EXACT: tl.constexpr, CAPPED: tl.constexpr):
    """Scaled and capped scores (rows, keys) of q (rows, dim) and k (keys, dim)."""
    t = (tl.dot(q, tl.trans(k), input_precision="ieee") if EXACT else tl.dot(q, tl.trans(k))) * scale
    return tanh(tl.div_rn(t, cap)) * cap if CAPPED else t


@remembered
@triton.jit
def attend(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, start_ptr, length_ptr, table_ptr, sequences, scale, window, cap, heads, dim,
    page, table_row, q_token, q_head, k_page, k_head, k_slot, v_page, v_head, v_slot,
    GROUP: tl.constexpr, PAGED: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, EXACT: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """TILE // GROUP queries of one sequence and the GROUP heads of one KV head."""
    SIZE: tl.constexpr = TILE // GROUP
    sequence = sequence_of(tl.program_id(0), start_ptr, sequences, SIZE)
    first = tl.load(start_ptr + sequence)
    count = tl.load(start_ptr + sequence + 1) - first
    begin = (tl.program_id(0) - (first // SIZE + sequence)) * SIZE
    if begin >= count:
        return
    length = tl.load(length_ptr + sequence) if PAGED else count
    kv_head = tl.program_id(1).to(tl.int64)
    row, column = tl.arange(0, TILE), tl.arange(0, DIM)
    query, head = begin + row // GROUP, kv_head * GROUP + row % GROUP
    valid, in_dim = (row < SIZE * GROUP) & (query < count), column < dim
    token = (first + query).to(tl.int64)
    q_place = q_ptr + token[:, None] * q_token + head[:, None] * q_head + column[None, :]
    q = tl.load(q_place, mask=valid[:, None] & in_dim[None, :], other=0.0)
    position = length - count + query
    end = length - count + tl.minimum(begin + SIZE, count)
    low = tl.maximum(length - count + begin - window + 1, 0) // BLOCK * BLOCK if WINDOWED else 0
    peak = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    o = tl.zeros([TILE, DIM], tl.float32)
    for start in range(low, end, BLOCK):
        key = start + tl.arange(0, BLOCK)
        exists = key < end
        if PAGED:
            at = tl.load(table_ptr + sequence * table_row + key // page, mask=exists, other=0).to(tl.int64)
            slot = (key % page).to(tl.int64)
        else:
            at, slot = (first + key).to(tl.int64), tl.zeros([BLOCK], tl.int64)
        mask = exists[:, None] & in_dim[None, :]
        k_place = (at * k_page + kv_head * k_head + slot * k_slot)[:, None] + column[None, :]
        v_place = (at * v_page + kv_head * v_head + slot * v_slot)[:, None] + column[None, :]
        t = score(q, tl.load(k_ptr + k_place, mask=mask, other=0.0), scale, cap, EXACT, CAPPED) * LOG2_E
        visible = key[None, :] <= position[:, None]
        if WINDOWED:
            visible = visible & (key[None, :] > position[:, None] - window)
        t = tl.where(visible, t, float("-inf"))
        higher = tl.maximum(peak, tl.max(t, 1))
        level = tl.where(higher == float("-inf"), 0.0, higher)
        weight, shrink = tl.exp2(t - level[:, None]), tl.exp2(peak - level)
        total = total * shrink + tl.sum(weight, 1)
        v = tl.load(v_ptr + v_place, mask=mask, other=0.0)
        if EXACT:
            o = tl.dot(weight, v, o * shrink[:, None], input_precision="ieee")
        else:
            o = tl.dot(weight.to(v.dtype), v, o * shrink[:, None])
        peak = higher
    place = token * heads + head
    y = tl.div_rn(o, tl.broadcast_to(total[:, None], [TILE, DIM]))
    o_place = o_ptr + place[:, None] * dim + column[None, :]
    tl.store(o_place, y.to(o_ptr.dtype.element_ty), mask=valid[:, None] & in_dim[None, :])
    if not PAGED:
        tl.store(lse_ptr + place, (peak + tl.log2(total)) * LN_2, mask=valid)


def programs(tokens: int, sequences: int, size: int) -> int:
    """How many tiles of ``size`` tokens any split of ``tokens`` into ``sequences`` needs at most."""
    return tokens // size + sequences


def options(spec: AttentionSpec, dtype: torch.dtype, dim: int) -> dict[str, int | bool]:
    """The compile-time choices that follow from the structure."""
    return {
        "WINDOWED": spec.window is not None,
        "CAPPED": spec.soft_cap is not None,
        "EXACT": dtype != torch.bfloat16,
        "BLOCK": KEYS,
        "DIM": max(16, power_of_2(dim)),
    }


def packed(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """(o (T, heads, dim), lse (T, heads) in fp32, natural logarithm)."""
    tokens, heads, dim = q.shape
    o = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    group, sequences = heads // k.shape[1], cu_seqlens.shape[0] - 1
    if tokens:
        attend[(programs(tokens, sequences, ROWS // group), k.shape[1])](
            q, k, v, o, lse, cu_seqlens, None, None, sequences, spec.scale, spec.window or 0, spec.soft_cap or 0.0,
            heads, dim, 0, 0, q.stride(0), q.stride(1), k.stride(0), k.stride(1), 0, v.stride(0), v.stride(1), 0,
            GROUP=group, PAGED=False, TILE=ROWS, **options(spec, q.dtype, dim), num_warps=WARPS,
        )  # fmt: skip
    return o, lse


def paged(q: Tensor, cache: KvCache, batch: PagedBatch, spec: AttentionSpec, o: Tensor) -> None:
    """Fills the asked rows of o (T, heads, dim)."""
    tokens, heads, dim = q.shape
    keys, values, kv_heads = cache.keys, cache.values, cache.keys.shape[1]
    group, sequences = heads // kv_heads, batch.seq_lens.shape[0]
    if tokens and sequences:
        attend[(programs(tokens, sequences, ROWS // group), kv_heads)](
            q, keys, values, o, None, batch.query_start, batch.seq_lens, batch.block_table, sequences, spec.scale,
            spec.window or 0, spec.soft_cap or 0.0, heads, dim, keys.shape[2], batch.block_table.stride(0),
            q.stride(0), q.stride(1), *keys.stride()[:3], *values.stride()[:3], GROUP=group, PAGED=True, TILE=ROWS,
            **options(spec, q.dtype, dim), num_warps=WARPS,
        )  # fmt: skip
