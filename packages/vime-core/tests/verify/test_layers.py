"""Taps compared row by row: the first unequal operation is found, whatever comes after it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vime_core.alignment.taps import LAYER_TAPS
from vime_core.record.taps import TapRows, from_torch
from vime_core.verify.layers import compare_taps

LENGTH, PROMPT = 7, 3
NAMES = ["embedding", *(f"layers.{layer}.{name}" for layer in range(2) for name in LAYER_TAPS), "final_norm", "logits"]


def recorded(side: str) -> dict[str, TapRows]:
    """The trainer records every position and logits of the response; the engine never sees the last token."""
    last = LENGTH if side == "trainer" else LENGTH - 1
    result: dict[str, TapRows] = {}
    for number, name in enumerate(NAMES):
        start = PROMPT - 1 if name == "logits" else 0
        positions = np.arange(start, LENGTH - 1 if name == "logits" else last)
        rng = np.random.default_rng(number)
        rows = rng.normal(size=(LENGTH, 4)).astype(np.float32)[positions]
        result[name] = TapRows(positions, rows, "float32")
    return result


def changed(taps: dict[str, TapRows], name: str, position: int, element: int, ulps: int = 1) -> dict[str, TapRows]:
    rows = taps[name].rows.copy()
    place = int(np.searchsorted(taps[name].positions, position))
    bits = rows.view(np.uint32)
    bits[place, element] = bits[place, element] + ulps
    return taps | {name: replace(taps[name], rows=rows)}


def test_equal_taps() -> None:
    found = compare_taps(recorded("engine"), recorded("trainer"), PROMPT, LENGTH)
    assert (found.first, found.faults, found.unequal) == (None, (), 0)
    assert [tap.tap for tap in found.taps] == NAMES
    assert {tap.rows for tap in found.taps} == {6, 4}
    assert sum(tap.compared for tap in found.taps) == (len(NAMES) - 1) * 24 + 16


@given(st.integers(0, len(NAMES) - 1), st.integers(PROMPT - 1, LENGTH - 2), st.integers(0, 3))
def test_the_first_in_the_order_of_computation(number: int, position: int, element: int) -> None:
    engine = changed(recorded("engine"), NAMES[number], position, element)
    for later in NAMES[number + 1 :]:  # what follows from it, at earlier places of the row too
        engine = changed(engine, later, PROMPT - 1, 0, ulps=100)
    first = compare_taps(engine, recorded("trainer"), PROMPT, LENGTH).first
    assert first is not None
    assert (first.tap, first.position, first.element, first.ulps) == (NAMES[number], position, element, 1)
    assert first.inputs_equal is True
    assert first.operation == NAMES[number].split(".")[-1]


def test_words() -> None:
    engine = changed(recorded("engine"), "layers.1.q_rope", 4, 2, ulps=3)
    text = str(compare_taps(engine, recorded("trainer"), PROMPT, LENGTH).first)
    assert text.startswith("layer 1, q_rope, position 4, element 2: ")
    assert "3 ulps apart" in text
    assert text.endswith("every tap before it is equal")


def test_nan_on_both_sides_is_unequal() -> None:
    def poisoned(side: str) -> dict[str, TapRows]:
        taps = recorded(side)
        rows = taps["layers.0.v"].rows.copy()
        rows[1, 1] = np.nan
        return taps | {"layers.0.v": replace(taps["layers.0.v"], rows=rows)}

    first = compare_taps(poisoned("engine"), poisoned("trainer"), PROMPT, LENGTH).first
    assert first is not None
    assert (first.tap, first.position, first.ulps) == ("layers.0.v", 1, None)
    assert "one of them is not a number" in str(first)


def without(taps: dict[str, TapRows], name: str) -> dict[str, TapRows]:
    return {key: rows for key, rows in taps.items() if key != name}


def test_a_tap_of_one_side_is_a_fault_and_makes_inputs_unknown() -> None:
    found = compare_taps(without(recorded("engine"), "layers.0.q"), recorded("trainer"), PROMPT, LENGTH)
    assert found.faults == ("tap 'layers.0.q' was recorded by the trainer only",)
    engine = changed(without(recorded("engine"), "layers.0.q"), "layers.0.attention", 2, 0)
    first = compare_taps(engine, recorded("trainer"), PROMPT, LENGTH).first
    assert first is not None
    assert (first.tap, first.inputs_equal) == ("layers.0.attention", None)
    assert "not every tap before it was recorded" in str(first)
    other = compare_taps(recorded("engine"), without(recorded("trainer"), "logits"), PROMPT, LENGTH)
    assert other.faults == ("tap 'logits' was recorded by the engine only",)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("layers.0.q", lambda t: TapRows(t.positions[1:], t.rows[1:], t.dtype), "lacks 1 positions, first 0"),
        ("logits", lambda t: TapRows(t.positions[:-1], t.rows[:-1], t.dtype), "lacks 1 positions, first 5"),
        ("logits", lambda t: TapRows(t.positions, t.rows[:, :3], t.dtype), "rows of another form"),
        ("embedding", lambda t: TapRows(t.positions, t.rows.astype(np.float64), "float64"), "another form"),
        ("embedding", lambda t: TapRows(t.positions, t.rows[:2], t.dtype), "has 2 rows for 6 positions"),
    ],
)
def test_rows_that_cannot_be_paired(name: str, change: Any, words: str) -> None:
    engine = recorded("engine")
    found = compare_taps(engine | {name: change(engine[name])}, recorded("trainer"), PROMPT, LENGTH)
    assert len(found.faults) == 1
    assert words in found.faults[0]
    assert name not in {tap.tap for tap in found.taps}


def test_a_position_that_the_trainer_lacks_is_a_fault() -> None:
    trainer = recorded("trainer")
    short = TapRows(trainer["layers.0.q"].positions[1:], trainer["layers.0.q"].rows[1:], "float32")
    found = compare_taps(recorded("engine"), trainer | {"layers.0.q": short}, PROMPT, LENGTH)
    assert found.faults == ("tap 'layers.0.q' of the trainer lacks 1 positions, first 0",)


def test_a_position_that_comes_twice_is_a_fault() -> None:
    taps = {name: replace(one, positions=one.positions // 2 * 2) for name, one in recorded("engine").items()}
    found = compare_taps(taps, taps, PROMPT, LENGTH)
    assert any("has 6 rows for 6 positions" in fault for fault in found.faults)


def test_nothing_recorded_compares_nothing() -> None:
    found = compare_taps({}, {}, PROMPT, LENGTH)
    assert (found.taps, found.first, found.faults) == ((), None, ())


def test_bfloat16_rows_are_compared_as_bits() -> None:
    import torch

    rows = torch.tensor([[1.0, -0.0], [2.5, 3.0]], dtype=torch.bfloat16)
    other = rows.clone()
    other[1, 0] = torch.tensor(2.5, dtype=torch.bfloat16).view(torch.int16).add(1).view(torch.bfloat16)
    positions = torch.arange(2)
    sides = [from_torch({"embedding": (positions, one)}) for one in (rows, other)]
    assert sides[0]["embedding"].dtype == "bfloat16"
    first = compare_taps(sides[0], sides[1], 1, 3).first
    assert first is not None
    assert (first.position, first.element, first.ulps) == (1, 0, 1)
    assert (first.engine, first.trainer) == (2.5, 2.515625)
