"""Taps of both sides, row by row: the first operation whose result differs, and whether its inputs were equal."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from vime_core.alignment.taps import LOGITS
from vime_core.record.taps import TapRows
from vime_core.verify.difference import distance
from vime_core.verify.ulps import BitComparison, compare_bfloat16, compare_bits

_LAYER: Final = re.compile(r"layers\.(\d+)\.(.+)")


@dataclass(frozen=True)
class TapDifference:
    """The first unequal element in the order of computation.

    Args:
        tap: full name.
        position: of the token in its sequence, from 0.
        element: within the row.
        engine: value on the engine's side; a double holds it exactly.
        trainer: value on the trainer's side.
        sides: what the two are called, where they are two runs.
        ulps: between them; None when one is NaN.
        inputs_equal: every tap before it was compared and is equal, so this operation is where the sides part; None
            when one of them was not recorded on both sides.
    """

    tap: str
    position: int
    element: int
    engine: float
    trainer: float
    ulps: int | None
    inputs_equal: bool | None
    sides: tuple[str, str] = ("engine", "trainer")

    @property
    def layer(self) -> int | None:
        """None for a tap outside of the layers."""
        match = _LAYER.fullmatch(self.tap)
        return int(match[1]) if match else None

    @property
    def operation(self) -> str:
        """The tap's name within its layer."""
        match = _LAYER.fullmatch(self.tap)
        return match[2] if match else self.tap

    def __str__(self) -> str:
        where = self.operation if self.layer is None else f"layer {self.layer}, {self.operation}"
        equal, unknown = "every tap before it is equal", "not every tap before it was recorded on both sides"
        values = (
            f"{self.engine:.9g} in the {self.sides[0]} and {self.trainer:.9g} in the {self.sides[1]},"
            f" {distance(self.ulps)}"
        )
        place = f"{where}, position {self.position}, element {self.element}"
        return f"{place}: {values}; {equal if self.inputs_equal else unknown}"


@dataclass(frozen=True)
class TapSummary:
    """One tap of one sequence: how many rows and elements were compared, and how they differ."""

    tap: str
    rows: int
    compared: int
    unequal: int
    largest_ulps: int
    largest_difference: float


@dataclass(frozen=True)
class TapComparison:
    """Taps of one sequence. ``faults`` say what was recorded on one side only, or in another form."""

    taps: tuple[TapSummary, ...]
    first: TapDifference | None
    faults: tuple[str, ...]

    @property
    def unequal(self) -> int:
        """Unequal elements in all taps."""
        return sum(tap.unequal for tap in self.taps)


def compare_taps(
    engine: Mapping[str, TapRows], trainer: Mapping[str, TapRows], prompt_length: int, length: int
) -> TapComparison:
    """Compare every tap of one sequence, in the order in which the trainer computed them.

    The engine never computes the last sampled token, and logits of sampled positions only: the positions that both
    must have are ``0 .. length - 2``, and ``prompt_length - 1 .. length - 2`` of the logits. Others are compared
    where both sides have them.

    Args:
        engine: rows by tap name.
        trainer: rows by tap name.
        prompt_length: tokens of the prompt.
        length: tokens of the whole sequence.
    """
    names = [*trainer, *(name for name in engine if name not in trainer)]
    faults: list[str] = []
    compared: list[tuple[TapSummary, TapDifference | None]] = []
    for name in names:
        start = prompt_length - 1 if name == LOGITS else 0
        found = [*_form_faults(name, engine.get(name), trainer.get(name), range(start, length - 1))]
        faults += found
        if not found:
            compared.append(_compare_tap(name, engine[name], trainer[name], inputs=None if faults else True))
    first = next((difference for _, difference in compared if difference), None)
    return TapComparison(tuple(summary for summary, _ in compared), first, tuple(faults))


def _form_faults(name: str, a: TapRows | None, b: TapRows | None, needed: Sequence[int]) -> Iterator[str]:
    if a is None or b is None:
        yield f"tap {name!r} was recorded by the {'trainer' if a is None else 'engine'} only"
        return
    if a.dtype != b.dtype or a.rows.shape[1:] != b.rows.shape[1:]:
        forms = " and ".join(f"{side.dtype} {list(side.rows.shape[1:])}" for side in (a, b))
        yield f"tap {name!r} has rows of another form: {forms}"
        return
    for side, rows in (("engine", a), ("trainer", b)):
        if len(np.unique(rows.positions)) != len(rows.rows):
            yield f"tap {name!r} of the {side} has {len(rows.rows)} rows for {len(rows.positions)} positions"
        lacking = sorted(set(needed) - set(rows.positions.tolist()))
        if lacking:
            yield f"tap {name!r} of the {side} lacks {len(lacking)} positions, first {lacking[0]}"


def _compare_tap(name: str, a: TapRows, b: TapRows, inputs: bool | None) -> tuple[TapSummary, TapDifference | None]:
    positions = np.intersect1d(a.positions, b.positions)
    rows_a, rows_b = (side.rows[np.searchsorted(side.positions, positions)] for side in (a, b))
    found = _compare_rows(rows_a, rows_b, a.dtype)
    summary = TapSummary(
        name, len(positions), found.compared, found.unequal, found.largest_ulps, found.largest_difference
    )
    if found.first is None:
        return summary, None
    row, element = divmod(found.first, rows_a.shape[1])
    engine, trainer = (_double(rows[row, element], a.dtype) for rows in (rows_a, rows_b))
    return summary, TapDifference(name, int(positions[row]), element, engine, trainer, found.first_ulps, inputs)


def _compare_rows(a: NDArray[Any], b: NDArray[Any], dtype: str) -> BitComparison:
    return compare_bfloat16(a, b) if dtype == "bfloat16" else compare_bits(a, b)


def _double(value: Any, dtype: str) -> float:
    if dtype == "bfloat16":
        return float((np.array([value], dtype=np.uint32) << np.uint32(16)).view(np.float32)[0])
    return float(value)
