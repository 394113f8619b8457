"""Which tile a linear is cut into, measured on one H200 (benchmarks/h200/linear_tiles.py). No tile changes a bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

PROGRAMS: Final = 132
"""Multiprocessors of a Hopper GPU; as many programs walk over the tiles of a large product."""


@dataclass(frozen=True)
class Tile:
    """Rows (of M), columns (of N) and depth (of K) of a step; warps and pipeline stages of its program."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


_PLAIN, _PLAIN_EXACT = Tile(128, 128, 64, 8, 3), Tile(64, 64, 64, 4, 3)
_FEW = (Tile(64, 16, 128, 4, 5), Tile(64, 32, 128, 4, 5), Tile(64, 64, 64, 4, 3))
_MANY = (Tile(64, 64, 128, 4, 5), Tile(128, 128, 64, 8, 4), Tile(128, 256, 64, 8, 3))


def plain(*, exact: bool) -> Tile:
    """For operands that only ordinary loads can read; ``exact``: fp32."""
    return _PLAIN_EXACT if exact else _PLAIN


def few_rows(columns: int) -> Tile:
    """For M up to 64, where the bytes of the weight are the bound: narrow enough that every multiprocessor reads."""
    if columns <= 16 * PROGRAMS:
        return _FEW[0]
    if columns <= 64 * PROGRAMS:
        return _FEW[1]
    return _FEW[2]


def many_rows(rows: int, columns: int, *, wide: bool) -> Tile:
    """For larger M, where arithmetic is the bound: as large as leaves no multiprocessor idle; ``wide``: fp32 output."""
    if _count(rows, columns, 64, 64) <= 2 * PROGRAMS:
        return _MANY[0]
    if wide or _count(rows, columns, 128, 256) < 2 * PROGRAMS:
        return _MANY[1]
    return _MANY[2]


def _count(rows: int, columns: int, height: int, width: int) -> int:
    return -(-rows // height) * -(-columns // width)
