"""The hash of ``hash128.py`` as a Triton kernel; `vime_core.record.hash128_cuda` prepares its work.

A *job* is a run of whole blocks of one tensor, done by one warp, which keeps a few blocks' sums in registers so that
each load of the keys serves several words. A tensor's first job also adds the block that is not whole, if there is one,
and the term of the length. Jobs add what they found to their tensor's A and B: integer sums, exact in whatever order.
"""

# Triton's language has no types.
# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from vime_core.record.hash128 import BLOCK_WORDS, GOLDEN

_GOLDEN = tl.constexpr(GOLDEN)
_BLOCK = tl.constexpr(BLOCK_WORDS)
_T, _U = tl.constexpr(2 * BLOCK_WORDS + 1), tl.constexpr(2 * BLOCK_WORDS + 2)
_COLUMNS = tl.constexpr(128)  # four words a thread: loads of 16 bytes


class Shape(NamedTuple):
    """How the kernel is cut, without effect on what it computes."""

    job_blocks: int
    rows: int
    """Blocks that a warp holds at once, a power of two."""
    unroll: int


@triton.jit
def _mix(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _term(sums, block, tweak: tl.constexpr):
    return _mix(sums + _mix((block * 2 + tweak).to(tl.uint64) * _GOLDEN))


@triton.jit
def _add(words, keys, columns, p_low, p_high, q_low, q_high):
    """Adds word * key as word * low half (64 bits) and word * high half (the 32 bits of it that count)."""
    wide = words.to(tl.uint64)
    p_low += wide * tl.load(keys + columns).to(tl.uint64)
    p_high += words * tl.load(keys + _BLOCK + columns)
    q_low += wide * tl.load(keys + 2 * _BLOCK + columns).to(tl.uint64)
    q_high += words * tl.load(keys + 3 * _BLOCK + columns)
    return p_low, p_high, q_low, q_high


@triton.jit
def _joined(low, high):
    return tl.sum(low + (high.to(tl.uint64) << 32), 1)


@triton.jit
def _whole_blocks(data, rows, end, keys, ROWS: tl.constexpr, UNROLL: tl.constexpr):
    """Terms of the blocks ``rows``, those before ``end``."""
    inside = rows < end
    p_low = tl.zeros([ROWS, _COLUMNS], tl.uint64)
    q_low = tl.zeros([ROWS, _COLUMNS], tl.uint64)
    p_high = tl.zeros([ROWS, _COLUMNS], tl.uint32)
    q_high = tl.zeros([ROWS, _COLUMNS], tl.uint32)
    for start in tl.range(0, _BLOCK, _COLUMNS, loop_unroll_factor=UNROLL):
        columns = (start + tl.arange(0, _COLUMNS))[None, :]
        words = tl.load(data + rows[:, None] * _BLOCK + columns, mask=inside[:, None], other=0)
        p_low, p_high, q_low, q_high = _add(words, keys, columns, p_low, p_high, q_low, q_high)
    a = tl.where(inside, _term(_joined(p_low, p_high), rows, _T), 0)
    b = tl.where(inside, _term(_joined(q_low, q_high), rows, _U), 0)
    return tl.sum(a, 0), tl.sum(b, 0)


@triton.jit
def _rest(data, length, whole, keys):
    """Terms of the block that is not whole, if there is one, and of the length."""
    p_low = tl.zeros([1, _COLUMNS], tl.uint64)
    q_low = tl.zeros([1, _COLUMNS], tl.uint64)
    p_high = tl.zeros([1, _COLUMNS], tl.uint32)
    q_high = tl.zeros([1, _COLUMNS], tl.uint32)
    bytes_left = length - whole * (4 * _BLOCK)
    for start in tl.range(0, (bytes_left + 3) // 4, _COLUMNS):
        columns = (start + tl.arange(0, _COLUMNS))[None, :]
        left = tl.minimum(tl.maximum(bytes_left - columns * 4, 0), 4)
        # The last word may reach up to 3 bytes past the tensor: an aligned word with one mapped byte is mapped.
        words = tl.load(data + whole * _BLOCK + columns, mask=left > 0, other=0)
        kept = words.to(tl.uint64) & ((tl.full([1, _COLUMNS], 1, tl.uint64) << (left * 8).to(tl.uint64)) - 1)
        p_low, p_high, q_low, q_high = _add(kept.to(tl.uint32), keys, columns, p_low, p_high, q_low, q_high)
    a = tl.sum(_term(_joined(p_low, p_high), whole, _T), 0)
    b = tl.sum(_term(_joined(q_low, q_high), whole, _U), 0)
    some = bytes_left > 0
    last, size = whole + some.to(tl.int64), length.to(tl.uint64)
    a = tl.where(some, a, 0) + _term(size, last, _T)
    return a, tl.where(some, b, 0) + _term(size, last, _U)


@triton.jit
def _hash_jobs(tensors, jobs, keys, JOB: tl.constexpr, ROWS: tl.constexpr, UNROLL: tl.constexpr):
    job = jobs + tl.program_id(0) * 2
    tensor = tensors + tl.load(job) * 4
    first = tl.load(job + 1).to(tl.int64) * JOB
    data = tl.multiple_of(tl.load(tensor).to(tl.pointer_type(tl.uint32)), 16)
    length = tl.load(tensor + 1)
    whole = length // (4 * _BLOCK)
    end = tl.minimum(first + JOB, whole)
    a = tl.full([], 0, tl.uint64)
    b = tl.full([], 0, tl.uint64)
    if first == 0:
        a, b = _rest(data, length, whole, keys)
    for row in tl.range(first, end, ROWS):
        x, y = _whole_blocks(data, row + tl.arange(0, ROWS), end, keys, ROWS, UNROLL)
        a += x
        b += y
    tl.atomic_add(tensor + 2, a.to(tl.int64), sem="relaxed")
    tl.atomic_add(tensor + 3, b.to(tl.int64), sem="relaxed")


def hash_jobs(tensors: Tensor, jobs: Tensor, keys: Tensor, shape: Shape) -> None:
    """Add to each tensor's A and B what its jobs find, on the current stream of the current device.

    Args:
        tensors: int64 [tensors, 4]: address (a multiple of 16), length in bytes, A, B.
        jobs: int32 [jobs, 2]: a tensor's number, and which of its jobs it is.
        keys: uint32 [4, 2048]: the low halves of the keys a, their high halves, the same of b.
        shape: the cut that the jobs were made for.
    """
    _hash_jobs[(len(jobs),)](tensors, jobs, keys, shape.job_blocks, shape.rows, shape.unroll, num_warps=1)
