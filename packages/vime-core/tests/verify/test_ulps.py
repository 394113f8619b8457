from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vime_core.verify.ulps import BitComparison, compare_bfloat16, compare_bits, compare_numbers

WORDS = st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)), max_size=20)
F32 = np.float32


def floats(words: list[int]) -> np.ndarray[Any, Any]:
    return np.array(words, dtype=np.uint32).view(np.float32)


def rank(word: int) -> int:
    """Place of a float among all floats of its sign-and-magnitude order, by plain integers."""
    return word + 2**31 if word < 2**31 else 2**32 - 1 - word


@given(WORDS)
@settings(max_examples=300, deadline=None)
def test_against_a_direct_computation(words: list[tuple[int, int]]) -> None:
    found = compare_bits(floats([a for a, _ in words]), floats([b for _, b in words]))
    values = [tuple(struct.unpack("<f", w.to_bytes(4, "little"))[0] for w in pair) for pair in words]
    nan = [math.isnan(a) or math.isnan(b) for a, b in values]
    unequal = [i for i, (a, b) in enumerate(words) if a != b or nan[i]]
    ulps = [abs(rank(a) - rank(b)) for a, b in words]
    assert found.compared == len(words)
    assert found.unequal == len(unequal)
    assert found.nan == sum(nan)
    assert found.first == (unequal[0] if unequal else None)
    assert found.largest_ulps == max((ulps[i] for i in unequal if not nan[i]), default=0)
    assert found.first_ulps == (ulps[unequal[0]] if unequal and not nan[unequal[0]] else None)
    if any(nan):
        assert math.isnan(found.largest_difference)
    else:
        assert found.largest_difference == max((abs(values[i][0] - values[i][1]) for i in unequal), default=0.0)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=20), st.data())
@settings(deadline=None)
def test_any_flipped_bit_is_seen_at_its_place(words: list[int], data: st.DataObject) -> None:
    place, bit = data.draw(st.integers(0, len(words) - 1)), data.draw(st.integers(0, 31))
    other = [*words]
    other[place] ^= 1 << bit
    found = compare_bits(floats(words), floats(other))
    nans = [i for i, value in enumerate(floats(words)) if np.isnan(value)]
    assert found.first == min([place, *nans])
    assert found.unequal == len({place, *nans})


def test_nan_equals_nothing() -> None:
    """`max(0.0, nan)` is 0.0: a gate built on it passes."""
    assert max(0.0, math.nan) == 0.0
    for a, b in (([math.nan], [math.nan]), ([math.nan], [1.0]), ([1.0], [math.nan])):
        found = compare_bits(np.array(a, dtype=F32), np.array(b, dtype=F32))
        assert found.unequal == 1
        assert found.first == 0
        assert found.first_ulps is None
        assert math.isnan(found.largest_difference)
        assert not found.largest_difference <= 1e9


def test_nan_does_not_hide_other_differences() -> None:
    found = compare_bits(np.array([1.0, math.nan, 2.0], dtype=F32), np.array([1.0, math.nan, 2.5], dtype=F32))
    assert (found.unequal, found.nan, found.first) == (2, 1, 1)
    assert found.largest_ulps == 2**21


def test_zeros_and_infinities() -> None:
    def compared(a: float, b: float) -> tuple[int, float, int]:
        found = compare_bits(np.array([a], dtype=F32), np.array([b], dtype=F32))
        return found.unequal, found.largest_difference, found.largest_ulps

    assert compared(0.0, -0.0) == (1, 0.0, 1)
    assert compared(math.inf, math.inf) == (0, 0.0, 0)
    assert compared(math.inf, -math.inf)[:2] == (1, math.inf)
    assert compared(math.inf, 1.0)[:2] == (1, math.inf)
    tiny = float(np.finfo(F32).smallest_subnormal)
    assert compared(tiny, -tiny) == (1, 2 * tiny, 3)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_neighbours_are_one_ulp_apart(dtype: type) -> None:
    values = np.array([0.0, 1.0, -1.0, 1e-3, -2.5], dtype=dtype)
    found = compare_bits(values, np.nextafter(values, dtype(np.inf)))
    assert (found.unequal, found.largest_ulps, found.first_ulps) == (5, 1, 1)


def test_doubles_are_compared_in_their_own_ulps() -> None:
    found = compare_bits(np.array([-1.7e308]), np.array([1.7e308]))
    assert found.largest_ulps > 2**63
    assert found.largest_difference == math.inf


def test_bfloat16_matches_float32_of_the_same_bits() -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.integers(0, 2**16, 500, dtype=np.uint16) for _ in range(2))
    found = compare_bfloat16(a, b)
    wide = compare_bits(*((x.astype(np.uint32) << 16).view(np.float32) for x in (a, b)))
    assert (found.unequal, found.nan, found.first) == (wide.unequal, wide.nan, wide.first)
    one = compare_bfloat16(np.array([0x3F80], dtype=np.uint16), np.array([0x3F81], dtype=np.uint16))
    assert (one.largest_ulps, one.largest_difference) == (1, 2.0**-7)


def test_shape_does_not_matter_but_must_agree() -> None:
    a = np.arange(6, dtype=F32).reshape(2, 3)
    b = a.copy()
    b[1, 2] = 7
    assert compare_bits(a, b).first == 5
    assert compare_bits(a.T, b.T).first == 5
    assert compare_bits(np.zeros(0, dtype=F32), np.zeros(0, dtype=F32)) == BitComparison(0, 0, 0, 0.0, 0, None, None)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (np.zeros(2, F32), np.zeros(3, F32)),
        (np.zeros(2, F32), np.zeros(2)),
        (np.zeros(2, np.int32), np.zeros(2, np.int32)),
        (np.zeros(1, F32), np.zeros((), F32)),
    ],
)
def test_what_does_not_match_is_no_comparison(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> None:
    with pytest.raises(ValueError, match="bit for bit"):
        compare_bits(a, b)


def test_bfloat16_must_come_as_bits() -> None:
    with pytest.raises(ValueError, match="bits of bfloat16"):
        compare_bfloat16(np.zeros(1, np.uint16), np.zeros(1, np.int16))  # type: ignore[arg-type]


def test_numbers_choose_their_precision() -> None:
    a = float(np.float32(0.1))
    assert compare_numbers(a, float(np.nextafter(np.float32(a), F32(1)))).largest_ulps == 1
    assert compare_numbers(0.1, float(np.nextafter(0.1, 1))).largest_ulps == 1
    assert compare_numbers(1e300, float(np.nextafter(1e300, 0))).largest_ulps == 1
    assert compare_numbers(math.nan, 1.0).unequal == 1
