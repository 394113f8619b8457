from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from vime_core.verify.company import smallest_company


@given(st.integers(1, 30), st.data())
def test_what_is_needed_is_what_is_left(size: int, data: st.DataObject) -> None:
    needed = set(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=3)))
    found = smallest_company(range(size), lambda items: needed <= set(items), most_trials=10_000)
    assert found.items == tuple(sorted(needed))
    assert found.minimal


@given(st.integers(1, 40), st.integers(1, 40))
def test_a_number_of_others(size: int, least: int) -> None:
    least = min(size, least)
    found = smallest_company(range(size), lambda items: len(items) >= least, most_trials=10_000)
    assert len(found.items) == least
    assert list(found.items) == sorted(found.items)


def test_one_that_breaks_it_alone_needs_few_trials() -> None:
    found = smallest_company(range(64), lambda items: 37 in items)
    assert (found.items, found.minimal) == ((37,), True)
    assert found.trials <= 20


def test_the_search_ends() -> None:
    found = smallest_company(range(64), lambda items: len(items) >= 60, most_trials=10)
    assert (found.trials, found.minimal) == (10, False)


def test_it_is_never_asked_about_nobody() -> None:
    asked: list[int] = []

    def breaks(items: Sequence[int]) -> bool:
        asked.append(len(items))
        return True

    assert len(smallest_company(range(5), breaks).items) == 1
    assert 0 not in asked
    assert smallest_company([3], breaks).items == (3,)
