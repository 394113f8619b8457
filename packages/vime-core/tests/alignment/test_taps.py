"""Taps are off by default, keyed by position, copied, and one sequence at a time."""

from __future__ import annotations

import pytest
import torch

from vime_core.alignment.taps import LAYER_TAPS, layer_tap, recording, tap
from vime_core.errors import RecordError


def test_nothing_is_recorded_outside_a_block() -> None:
    tap("a", torch.tensor([0]), torch.ones(1, 2))
    with recording() as taps:
        pass
    tap("a", torch.tensor([0]), torch.ones(1, 2))
    assert taps.names() == []


def test_prefill_and_decode_rows_meet_by_position() -> None:
    with recording() as taps:
        rows = torch.arange(6.0).reshape(3, 2)
        tap("a", torch.tensor([0, 1, 2]), rows)
        rows.zero_()
        tap("a", torch.tensor([4]), torch.full((1, 2), 9.0))
        tap("a", torch.tensor([3]), torch.full((1, 2), 8.0))
    positions, values = taps.tensors()["a"]
    assert positions.tolist() == [0, 1, 2, 3, 4]
    assert values.tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [8.0, 8.0], [9.0, 9.0]]


def test_a_second_sequence_is_refused() -> None:
    with recording():
        tap("a", torch.tensor([0, 1]), torch.ones(2, 2))
        with pytest.raises(RecordError, match="saw position 1 twice"):
            tap("a", torch.tensor([1]), torch.ones(1, 2))


def test_names_of_a_layer_are_distinct() -> None:
    assert len(set(LAYER_TAPS)) == len(LAYER_TAPS)
    assert layer_tap(3, "attention") == "layers.3.attention"
