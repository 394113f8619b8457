from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vime_core.errors import DataError
from vime_core.rl.packing import pack

BUDGET = 40
lengths = st.lists(st.integers(1, BUDGET), max_size=40)


def naive_best_fit_decreasing(lengths: list[int], budget: int) -> tuple[tuple[int, ...], ...]:
    bins: list[list[int]] = []
    remaining = list(range(len(lengths)))
    while remaining:
        index = max(remaining, key=lambda i: (lengths[i], -i))
        remaining.remove(index)
        loads = [sum(lengths[i] for i in b) for b in bins]
        fitting = [b for b in range(len(bins)) if loads[b] + lengths[index] <= budget]
        if fitting:
            bins[max(fitting, key=lambda b: (loads[b], -b))].append(index)
        else:
            bins.append([index])
    return tuple(sorted(tuple(sorted(b)) for b in bins))


@given(lengths)
def test_every_sequence_once_in_order_within_budget(lengths: list[int]) -> None:
    microbatches = pack(lengths, BUDGET)
    assert sorted(i for m in microbatches for i in m) == list(range(len(lengths)))
    assert all(list(m) == sorted(m) and m for m in microbatches)
    assert all(sum(lengths[i] for i in m) <= BUDGET for m in microbatches)
    assert list(microbatches) == sorted(microbatches)


@given(lengths)
def test_no_two_microbatches_fit_into_one(lengths: list[int]) -> None:
    loads = [sum(lengths[i] for i in m) for m in pack(lengths, BUDGET)]
    assert all(a + b > BUDGET for a, b in combinations(loads, 2))


@given(lengths)
def test_it_is_best_fit_decreasing(lengths: list[int]) -> None:
    assert pack(lengths, BUDGET) == naive_best_fit_decreasing(lengths, BUDGET)


def test_a_known_packing() -> None:
    assert pack([5, 9, 1, 6, 4], 10) == ((0,), (1, 2), (3, 4))
    assert pack([10, 10], 10) == ((0,), (1,))
    assert pack([], 10) == ()


def test_a_sequence_over_budget_is_named_with_its_remedy() -> None:
    with pytest.raises(DataError) as caught:
        pack([3, 11, 2], 10)
    assert "sequence 1 has 11 tokens" in caught.value.message
    assert "trainer.token_budget to at least 11" in caught.value.remedy


@pytest.mark.parametrize("bad", [0, -1])
def test_lengths_are_positive(bad: int) -> None:
    with pytest.raises(ValueError, match="sequence 1"):
        pack([3, bad], 10)
