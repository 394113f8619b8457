from __future__ import annotations

import time
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vime_core.rewards.answers import last_number, normalised, tagged


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is 42.", "42"),
        ("1 + 2 = 3", "3"),
        ("-7", "-7"),
        ("x = \N{MINUS SIGN}7", "-7"),
        ("5-3", "3"),
        ("(2)-3", "3"),
        ("$1,234.50", "1234.50"),
        ("1,234,567", "1234567"),
        ("12,34", "34"),
        ("wait...5", "5"),
        (".5 or -.25", "-0.25"),
        ("version 1.2.3", "1.2"),
        ("H2O", None),
        ("答案是42。", "42"),
        ("_42_ and **43**", "43"),
        ("\\boxed{18}", "18"),
        ("10% of 200 is 20%", "20"),
        ("", None),
        ("no number", None),
    ],
)
def test_last_number(text: str, number: str | None) -> None:
    assert last_number(text) == (None if number is None else Decimal(number))


@given(st.decimals(allow_nan=False, allow_infinity=False, places=3, min_value=-(10**9), max_value=10**9))
def test_a_written_number_is_read_back(value: Decimal) -> None:
    assert last_number(f"so the result is {value:,f}.") == value
    assert last_number(f"so the result is {value:f} apples") == value


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer> 5 </answer>", "5"),
        ("<answer>1</answer> no, <answer>2\n</answer>.", "2"),
        ("<answer>1</answer> and <answer>open", "1"),
        ("<answer>first <answer>second</answer>", "second"),
        ("<answer>never closed", ""),
        ("</answer><answer>", ""),
        ("</answer> stray", ""),
        ("none", ""),
        ("", ""),
    ],
)
def test_tagged(text: str, answer: str) -> None:
    assert tagged(text) == answer


@pytest.mark.parametrize("text", ["Paris", " paris. ", '"Paris"', "PARIS\n", "'Paris.'", "`Paris`."])
def test_normalised_strings_are_equal(text: str) -> None:
    assert normalised(text) == "paris"


def test_normalising_keeps_what_distinguishes() -> None:
    assert len({normalised(t) for t in ("New York", "Newyork", "new york city", "no")}) == 4


@pytest.mark.parametrize("text", ["1," * 250_000, "9" * 500_000, "-" * 500_000, "<answer>" * 100_000, ".1" * 250_000])
def test_time_is_linear(text: str) -> None:
    """Of the processor, so that a busy one does not count: a fraction of a second, or else minutes."""
    start = time.process_time()
    last_number(text)
    tagged(text)
    assert time.process_time() - start < 20
