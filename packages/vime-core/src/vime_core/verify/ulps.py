"""Exact comparison of floats by their bits. NaN is unequal to everything, itself included; -0.0 is unequal to 0.0."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Doubles = NDArray[np.float64]

_BITS: Final = {"float16": np.uint16, "float32": np.uint32, "float64": np.uint64}


@dataclass(frozen=True)
class BitComparison:
    """How two float arrays differ, element by element.

    Args:
        compared: elements.
        unequal: elements whose bits differ or that hold a NaN on either side.
        nan: elements that hold a NaN on either side.
        largest_difference: absolute, in fp64; NaN as soon as one element holds a NaN.
        largest_ulps: most floats that lie between two elements, counting one end; elements with NaN have no distance.
        first: flat index of the first unequal element.
        first_ulps: its distance; None without an unequal element or when it holds a NaN.
    """

    compared: int
    unequal: int
    nan: int
    largest_difference: float
    largest_ulps: int
    first: int | None
    first_ulps: int | None


def compare_bits(a: NDArray[Any], b: NDArray[Any]) -> BitComparison:
    """Compare arrays of float16, float32 or float64 (`compare_bfloat16` takes what numpy has no type for).

    Raises:
        ValueError: dtypes or shapes differ (an unmatched pair is no comparison), or the dtype is no such float.
    """
    if a.dtype != b.dtype or a.shape != b.shape or a.dtype.name not in _BITS:
        raise ValueError(f"cannot compare {a.dtype} {a.shape} with {b.dtype} {b.shape} bit for bit")
    bits = _BITS[a.dtype.name]
    flat_a, flat_b = (np.ascontiguousarray(x).reshape(-1) for x in (a, b))
    return _compare(flat_a.view(bits), flat_b.view(bits), _double(flat_a), _double(flat_b))


def compare_bfloat16(a: NDArray[np.uint16], b: NDArray[np.uint16]) -> BitComparison:
    """Compare bfloat16 that numpy holds as its bits (``tensor.view(torch.uint16).numpy()``). Raises ValueError."""
    if a.dtype != np.uint16 or b.dtype != np.uint16 or a.shape != b.shape:
        raise ValueError(f"cannot compare {a.dtype} {a.shape} with {b.dtype} {b.shape} as bits of bfloat16")
    flat_a, flat_b = a.reshape(-1), b.reshape(-1)
    return _compare(flat_a, flat_b, _widened(flat_a), _widened(flat_b))


def compare_numbers(a: float, b: float) -> BitComparison:
    """Compare two numbers, in ulps of fp32 when both are fp32 values, else of fp64."""
    pair = np.array([a, b], dtype=np.float64)
    with np.errstate(over="ignore"):
        single = pair.astype(np.float32)
    exact = bool((single.astype(np.float64) == pair).all())
    chosen = single if exact else pair
    return compare_bits(chosen[:1], chosen[1:])


def _compare(bits_a: NDArray[Any], bits_b: NDArray[Any], a: Doubles, b: Doubles) -> BitComparison:
    nan = np.isnan(a) | np.isnan(b)
    places = np.flatnonzero((bits_a != bits_b) | nan)
    ulps = _distance(bits_a[places], bits_b[places])
    numbers = ~nan[places]
    with np.errstate(over="ignore", invalid="ignore"):
        differences = np.abs(a[places] - b[places])
    return BitComparison(
        compared=int(bits_a.size),
        unequal=int(places.size),
        nan=int(nan.sum()),
        largest_difference=math.nan if nan.any() else float(differences.max(initial=0.0)),
        largest_ulps=int(ulps[numbers].max(initial=0)),
        first=int(places[0]) if places.size else None,
        first_ulps=int(ulps[0]) if places.size and numbers[0] else None,
    )


def _distance(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.uint64]:
    x, y = _ordered(a), _ordered(b)
    return (np.maximum(x, y) - np.minimum(x, y)).astype(np.uint64)


def _ordered(bits: NDArray[Any]) -> NDArray[Any]:
    """Bits of floats as unsigned integers in the floats' own order; -0.0 is the one just below 0.0."""
    sign = bits.dtype.type(1 << (8 * bits.dtype.itemsize - 1))
    return np.where(bits & sign, ~bits, bits | sign)


def _double(values: NDArray[Any]) -> Doubles:
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return values.astype(np.float64)


def _widened(bits: NDArray[np.uint16]) -> Doubles:
    return _double((bits.astype(np.uint32) << np.uint32(16)).view(np.float32))
