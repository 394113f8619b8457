"""Importance factors token by token in plain Python, and what must leave everything as it is."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vime_core.rl.correction import importance_factors

value = st.floats(min_value=-4, max_value=0, width=32)
pairs = st.lists(st.lists(st.tuples(value, value), min_size=1, max_size=5), min_size=1, max_size=4)
LEVELS = ["off", "token", "sequence"]
MODES = ["truncate", "clip", "mask"]


def arrays(responses: list[list[tuple[float, float]]], side: int) -> list[Any]:
    return [np.array([pair[side] for pair in response], dtype=np.float32) for response in responses]


def direct(
    response: list[tuple[float, float]], level: str, mode: str, low: float, high: float, reject: bool
) -> list[float]:
    product = math.exp(math.fsum(a - b for a, b in response))
    if reject and not low <= product <= high:
        return [0.0] * len(response)
    if level == "off":
        return [1.0] * len(response)
    ratios = [math.exp(a - b) if level == "token" else product for a, b in response]
    if mode == "truncate":
        return [min(r, high) for r in ratios]
    if mode == "clip":
        return [min(max(r, low), high) for r in ratios]
    return [r if low <= r <= high else 0.0 for r in ratios]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", MODES)
@given(responses=pairs, reject=st.booleans())
def test_factors_are_the_definition(level: Any, mode: Any, responses: Any, reject: bool) -> None:
    low, high = 0.52, 1.91
    found = importance_factors(
        arrays(responses, 0), arrays(responses, 1), level=level, mode=mode, low=low, high=high, reject=reject
    )
    for response, factors in zip(responses, found.factors, strict=True):
        assert factors.dtype == np.float32
        np.testing.assert_allclose(factors, direct(response, level, mode, low, high, reject), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", MODES)
def test_equal_bits_on_both_sides_change_nothing(level: Any, mode: Any) -> None:
    values = [np.array([-1.5, -0.1], dtype=np.float32), np.array([-3.25], dtype=np.float32)]
    found = importance_factors(values, values, level=level, mode=mode, low=1.0, high=1.0, reject=True)
    assert [factor.tolist() for factor in found.factors] == [[1.0, 1.0], [1.0]]
    assert found.metrics["correction/ratio"] == found.metrics["correction/ratio_max"] == 1.0
    assert found.metrics["correction/zero"] == found.metrics["correction/rejected"] == 0.0
    assert found.metrics["correction/below"] == found.metrics["correction/above"] == 0.0


def test_metrics_count_what_was_bounded() -> None:
    train = [np.zeros(2, dtype=np.float32), np.zeros(2, dtype=np.float32)]
    rollout = [np.array([1.0, -1.0], dtype=np.float32), np.array([-2.0, 0.0], dtype=np.float32)]
    found = importance_factors(train, rollout, level="token", mode="mask", low=0.5, high=2.0, reject=True)
    assert found.metrics["correction/below"] == 0.25
    assert found.metrics["correction/above"] == 0.5
    assert found.metrics["correction/rejected"] == 0.5
    assert found.metrics["correction/zero"] == 1.0


@pytest.mark.parametrize(("low", "high"), [(2.0, 1.0), (-1.0, 1.0)])
def test_bounds_out_of_order_are_refused(low: float, high: float) -> None:
    with pytest.raises(ValueError, match="bounds"):
        importance_factors([], [], level="token", mode="clip", low=low, high=high)
