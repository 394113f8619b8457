"""The scalar arithmetic and the orders of summation that every definition of the contract is built from.

Everything is written with elementwise torch operations that IEEE 754 rounds exactly (add, subtract, multiply,
divide, square root, comparisons, integer work), so the bits depend neither on the device, nor on vector width,
nor on the number of threads. Other providers implement the same expressions and must give the same bits.

Subnormal fp32 numbers count as zero, as inputs and as results (vector units flush them in hardware).

Orders of summation over n terms:

- *lanes*: sixteen accumulators; lane j adds the terms i with i mod 16 == j in ascending i; then a tree adds
  lane j + 8, j + 4, j + 2, j + 1. Missing terms of the last block are zeros.
- *paired lanes*, for dot products of bf16: blocks of 32; lane j adds the product of elements 2j + 1, then that of
  2j, of each block in ascending order; the same tree. This is what one AVX-512 ``vdpbf16ps`` computes per lane,
  and two fp32 fused multiply-adds give the same bits anywhere else.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

LANES = 16
SMALLEST_NORMAL = 2.0**-126
ROUND_SHIFT = 12582912.0  # 1.5 * 2^23: adding it leaves round(x) in the low bits of the significand
ROUND_SHIFT_BITS = 0x4B400000
LOG2_E = 1.44269504088896341
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4  # Cody-Waite: n * LN2_HIGH is exact in fp32
EXP_LOWEST, EXP_HIGHEST = -87.0, 88.0  # inside these no scale is subnormal or infinite
EXP_POLYNOMIAL = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
_TANH_POLYNOMIAL = (
    -5.70498872745e-3,
    2.06390887954e-2,
    -5.37397155531e-2,
    1.33314422036e-1,
    -3.33332819422e-1,
)
_TANH_SMALL = 0.625
_LN2 = 0.6931471805599453


def flush(x: Tensor) -> Tensor:
    """Subnormal numbers become zeros of their sign."""
    return torch.where(x.abs() < SMALLEST_NORMAL, x * 0.0, x)


def widen(x: Tensor) -> Tensor:
    """Exactly to fp32, subnormals flushed."""
    return flush(x.float())


def narrow(x: Tensor, dtype: torch.dtype) -> Tensor:
    """From fp32 to ``dtype``, rounding to nearest even once."""
    return flush(x).to(dtype)


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """``a * b + c`` in fp32 with one rounding.

    The product is exact in fp64; the fp64 sum is rounded to odd (Boldo and Melquiond, "Emulation of FMA and
    correctly rounded sums", 2008), after which rounding to fp32 is the correct single rounding.
    """
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    virtual = total - product
    error = (product - (total - virtual)) + (addend - virtual)
    bits = total.contiguous().view(torch.int64)
    to_odd = torch.where((error > 0) == (total > 0), bits + 1, bits - 1)
    return flush(torch.where((error != 0) & (bits % 2 == 0), to_odd, bits).view(torch.float64).float())


def sqrt(x: Tensor) -> Tensor:
    """The correctly rounded square root of fp32.

    torch's own is off by an ulp for a fifth of all arguments on some CPUs. The root of a 24-bit number lies at least
    2^-51 of itself from every midpoint of fp32, so rounding an fp64 root that is good to an ulp is exact.
    """
    return torch.sqrt(x.double()).float()


def _blocks(x: Tensor, width: int) -> Tensor:
    padding = -x.shape[-1] % width
    padded = torch.nn.functional.pad(x, (0, padding)) if padding else x
    return padded.reshape([*x.shape[:-1], -1, width])


def _lanes(a: Tensor, b: Tensor) -> Tensor:
    leading = np.broadcast_shapes(tuple(a.shape[:-1]), tuple(b.shape[:-1]))
    return torch.zeros([*leading, LANES], dtype=torch.float32, device=a.device)


def tree_sum(lanes: Tensor) -> Tensor:
    """Adds the sixteen lanes of the last dimension: lane j + 8, then + 4, + 2, + 1."""
    for half in (8, 4, 2, 1):
        lanes = lanes[..., :half] + lanes[..., half : 2 * half]
    return lanes[..., 0]


def lane_sum(x: Tensor) -> Tensor:
    """Sum of fp32 values over the last dimension in the order *lanes*."""
    blocks = _blocks(x, LANES)
    total = torch.zeros_like(blocks[..., 0, :])
    for block in blocks.unbind(-2):
        total = total + block
    return tree_sum(total)


def lane_dot(a: Tensor, b: Tensor) -> Tensor:
    """Dot product over the last dimension, the other dimensions broadcast; fp32.

    bf16: *paired lanes*; products of bf16 are exact in fp32, so multiply-then-add is the fused operation.
    fp32: *lanes*, by fused multiply-add.
    """
    return _dot_bf16(a, b) if a.dtype == torch.bfloat16 else _dot_fp32(a, b)


def _dot_bf16(a: Tensor, b: Tensor) -> Tensor:
    blocks_a, blocks_b, total = _blocks(widen(a), 2 * LANES), _blocks(widen(b), 2 * LANES), _lanes(a, b)
    for block in range(blocks_a.shape[-2]):
        for half in (1, 0):
            total = total + blocks_a[..., block, half::2] * blocks_b[..., block, half::2]
    return tree_sum(total)


def _dot_fp32(a: Tensor, b: Tensor) -> Tensor:
    blocks_a, blocks_b, total = _blocks(widen(a), LANES), _blocks(widen(b), LANES), _lanes(a, b)
    for block in range(blocks_a.shape[-2]):
        total = fma(blocks_a[..., block, :], blocks_b[..., block, :], total)
    return tree_sum(total)


def column_sum(x: Tensor) -> Tensor:
    """Sum of fp32 ``x`` (M, K) over its rows in ascending order: (K)."""
    total = torch.zeros_like(x[0]) if x.shape[0] else x.new_zeros(x.shape[1:])
    for row in x.unbind(0):
        total = total + row
    return total


def _polynomial(coefficients: tuple[float, ...], x: Tensor) -> Tensor:
    value = torch.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        value = value * x + coefficient
    return value


def exp(x: Tensor) -> Tensor:
    """e^x in fp32 (Cody-Waite reduction, Cephes ``expf`` polynomial), 0 below -87 and infinite above 88."""
    shifted = x * LOG2_E + ROUND_SHIFT
    n = shifted - ROUND_SHIFT
    r = (x - n * LN2_HIGH) - n * LN2_LOW
    fraction = (_polynomial(EXP_POLYNOMIAL, r) * (r * r) + r) + 1.0
    scale = ((shifted.contiguous().view(torch.int32) - (ROUND_SHIFT_BITS - 127)) << 23).view(torch.float32)
    value = torch.where(x > EXP_HIGHEST, torch.full_like(x, math.inf), fraction * scale)
    return torch.where(x < EXP_LOWEST, torch.zeros_like(x), value)


def log(x: Tensor) -> Tensor:
    """ln x of positive fp32, computed in fp64 as e ln 2 + 2 atanh((m - 1) / (m + 1)), rounded once."""
    mantissa, exponent = torch.frexp(x.double())
    small = mantissa < math.sqrt(0.5)
    mantissa = torch.where(small, mantissa * 2.0, mantissa)
    exponent = torch.where(small, exponent - 1, exponent).double()
    z = (mantissa - 1.0) / (mantissa + 1.0)
    series = torch.full_like(z, 1.0 / 23)
    for denominator in range(21, 0, -2):
        series = series * (z * z) + 1.0 / denominator
    return (exponent * _LN2 + (2.0 * z) * series).float()


def tanh(x: Tensor) -> Tensor:
    """tanh x in fp32 (Cephes ``tanhf``: a polynomial below 0.625, else 1 - 2 / (e^2|x| + 1))."""
    size, square = x.abs(), x * x
    small = (_polynomial(_TANH_POLYNOMIAL, square) * square) * x + x
    large = 1.0 - 2.0 / (exp(size + size) + 1.0)
    return torch.where(size < _TANH_SMALL, small, torch.where(x < 0, -large, large))
