"""The draw (:mod:`vime_core.numerics.draw`) by three kernels: peaks of blocks, sums of blocks, the token.

A row is cut into blocks, so that one row alone keeps a GPU busy, and nothing of the size of the logits is written. The
weights are computed twice, by one function, from e^x as :mod:`vime_core.numerics.arithmetic` defines it: operations
that IEEE 754 rounds, compiled without fusing any (``enable_fp_fusion``), so they are the reference's integers.
"""

# Triton's language has no types.
# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vime_core.numerics import arithmetic, draw
from vime_core.numerics.cuda.launch import UNFUSED, remembered
from vime_core.numerics.cuda.scoring import temperature_of
from vime_core.numerics.cuda.sizes import parts, power_of_2

_BLOCK = 4096
_NUMBERS = 128
_WEIGHT_ONE = tl.constexpr(draw.WEIGHT_ONE)
_ROUNDS = tl.constexpr(draw.PHILOX_ROUNDS)
_FACTOR_0, _FACTOR_1 = (tl.constexpr(factor) for factor in draw.PHILOX_FACTORS)
_STEP_0, _STEP_1 = (tl.constexpr(step) for step in draw.PHILOX_STEPS)
_SMALLEST_NORMAL = tl.constexpr(arithmetic.SMALLEST_NORMAL)
_LOG2_E = tl.constexpr(arithmetic.LOG2_E)
_LN2_HIGH, _LN2_LOW = tl.constexpr(arithmetic.LN2_HIGH), tl.constexpr(arithmetic.LN2_LOW)
_ROUND_SHIFT = tl.constexpr(arithmetic.ROUND_SHIFT)
_SCALE_SHIFT = tl.constexpr(arithmetic.ROUND_SHIFT_BITS - 127)
_LOWEST, _HIGHEST = tl.constexpr(arithmetic.EXP_LOWEST), tl.constexpr(arithmetic.EXP_HIGHEST)
_C0, _C1, _C2, _C3, _C4, _C5 = (tl.constexpr(c) for c in arithmetic.EXP_POLYNOMIAL)


@triton.jit
def number(seed, place):
    """u of int64 seeds and places: the first two words of Philox4x32-10."""
    a, b = place.to(tl.uint64), tl.zeros_like(place).to(tl.uint64)
    c, d = b, b
    k0, k1 = seed.to(tl.uint64) & 0xFFFFFFFF, seed.to(tl.uint64) >> 32
    for _ in tl.static_range(_ROUNDS):
        x, y = a * _FACTOR_0, c * _FACTOR_1
        a, b, c, d = (y >> 32) ^ b ^ k0, y & 0xFFFFFFFF, (x >> 32) ^ d ^ k1, x & 0xFFFFFFFF
        k0, k1 = (k0 + _STEP_0) & 0xFFFFFFFF, (k1 + _STEP_1) & 0xFFFFFFFF
    return ((a << 31) | (b >> 1)).to(tl.int64)


@triton.jit
def flush(x):
    """Subnormal numbers become zeros."""
    return tl.where(tl.abs(x) < _SMALLEST_NORMAL, 0.0, x)


@triton.jit
def exp(x):
    """``arithmetic.exp``."""
    shifted = x * _LOG2_E + _ROUND_SHIFT
    n = shifted - _ROUND_SHIFT
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    polynomial = ((((_C0 * r + _C1) * r + _C2) * r + _C3) * r + _C4) * r + _C5
    fraction = (polynomial * (r * r) + r) + 1.0
    scale = ((shifted.to(tl.int32, bitcast=True) - _SCALE_SHIFT) << 23).to(tl.float32, bitcast=True)
    value = tl.where(x > _HIGHEST, float("inf"), fraction * scale)
    return tl.where(x < _LOWEST, 0.0, value)


@triton.jit
def scaled(row_ptr, column, size, temperature):
    """z of columns; NaN and what lies behind the last column are -inf."""
    logits = tl.load(row_ptr + column, mask=column < size, other=float("-inf")).to(tl.float32)
    z = flush(tl.div_rn(flush(logits), temperature))
    return tl.where(z == z, z, float("-inf"))


@triton.jit
def weights_of(row_ptr, column, size, temperature, peak, greedy):
    """The integer weights of columns."""
    z = scaled(row_ptr, column, size, temperature)
    e = exp(z - peak)
    e = tl.where((e == e) & (e < float("inf")), e, 0.0)
    drawn = (e.to(tl.float64) * _WEIGHT_ONE).to(tl.int64)
    return tl.where(column < size, tl.where(greedy, (z == peak).to(tl.int64), drawn), 0)


@triton.jit
def number_of(u_ptr, temperature_ptr, row):
    """u of a row; negative, for the largest logit, where its temperature is 0."""
    return tl.where(tl.load(temperature_ptr + row) == 0.0, -1, tl.load(u_ptr + row))


@triton.jit
def peak_of(peak_ptr, row, blocks, BLOCKS: tl.constexpr):
    """The largest z of a row."""
    block = tl.arange(0, BLOCKS)
    return tl.max(tl.load(peak_ptr + row * blocks + block, mask=block < blocks, other=float("-inf")), 0)


@remembered
@triton.jit
def all_numbers(seed_ptr, place_ptr, u_ptr, count, BLOCK: tl.constexpr):
    """u of a block of rows."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    seed = tl.load(seed_ptr + row, mask=row < count, other=0)
    place = tl.load(place_ptr + row, mask=row < count, other=0)
    tl.store(u_ptr + row, number(seed, place), mask=row < count)


@remembered
@triton.jit
def block_peaks(logits_ptr, temperature_ptr, peak_ptr, size, blocks, BLOCK: tl.constexpr):
    """The largest z of each block."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    z = scaled(logits_ptr + row * size, column, size, temperature_of(temperature_ptr, row))
    tl.store(peak_ptr + row * blocks + block, tl.max(z, 0))


@remembered
@triton.jit
def block_sums(
    logits_ptr, temperature_ptr, u_ptr, peak_ptr, sum_ptr, size, blocks, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
):
    """The sum of the weights of each block."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column, peak = block * BLOCK + tl.arange(0, BLOCK), peak_of(peak_ptr, row, blocks, BLOCKS)
    temperature, greedy = temperature_of(temperature_ptr, row), number_of(u_ptr, temperature_ptr, row) < 0
    weights = weights_of(logits_ptr + row * size, column, size, temperature, peak, greedy)
    tl.store(sum_ptr + row * blocks + block, tl.sum(weights, 0))


@remembered
@triton.jit
def drawn_token(
    logits_ptr, temperature_ptr, u_ptr, peak_ptr, sum_ptr, token_ptr, size, blocks,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """The token of a row: first the block, by the sums of blocks before it, then the column."""
    row, block = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCKS)
    u, peak = number_of(u_ptr, temperature_ptr, row), peak_of(peak_ptr, row, blocks, BLOCKS)
    sums = tl.load(sum_ptr + row * blocks + block, mask=block < blocks, other=0)
    total, cumulated = tl.sum(sums, 0), tl.cumsum(sums, 0)
    share = (tl.maximum(u, 0) >> 10).to(tl.float64) * 1.1102230246251565e-16  # 2^-53
    target = tl.minimum((share * total.to(tl.float64)).to(tl.int64), total - 1)
    passed = cumulated <= target
    before, first = tl.sum(tl.where(passed, sums, 0), 0), tl.sum(passed.to(tl.int32), 0) * BLOCK
    column = first + tl.arange(0, BLOCK)
    weights = weights_of(logits_ptr + row * size, column, size, temperature_of(temperature_ptr, row), peak, u < 0)
    token = first + tl.sum((before + tl.cumsum(weights, 0) <= target).to(tl.int32), 0)
    tl.store(token_ptr + row, tl.where(total > 0, token, 0).to(tl.int64))


def draw_numbers(seeds: Tensor, places: Tensor) -> Tensor:
    """u int64 (rows) of seeds and places int64 (rows)."""
    count = seeds.shape[0]
    u = torch.empty(count, dtype=torch.int64, device=seeds.device)
    if count:
        grid = (parts(count, _NUMBERS),)
        all_numbers[grid](seeds.contiguous(), places.contiguous(), u, count, BLOCK=_NUMBERS)
    return u


def draw_tokens(logits: Tensor, temperatures: Tensor, u: Tensor) -> Tensor:
    """Tokens int64 (rows) of logits (rows, V), temperatures fp32 (rows) and u int64 (rows)."""
    logits, temperatures, u = logits.contiguous(), temperatures.contiguous(), u.contiguous()
    rows, size = logits.shape
    block = min(_BLOCK, power_of_2(size))
    blocks = parts(size, block)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    peaks = torch.empty(rows, blocks, dtype=torch.float32, device=logits.device)
    sums = torch.empty(rows, blocks, dtype=torch.int64, device=logits.device)
    if not rows:
        return tokens
    exact = {"BLOCK": block, "num_warps": 8, **UNFUSED}
    wide = {**exact, "BLOCKS": power_of_2(blocks)}
    block_peaks[(rows, blocks)](logits, temperatures, peaks, size, blocks, **exact)
    block_sums[(rows, blocks)](logits, temperatures, u, peaks, sums, size, blocks, **wide)
    drawn_token[(rows,)](logits, temperatures, u, peaks, sums, tokens, size, blocks, **wide)
    return tokens
