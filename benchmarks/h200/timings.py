"""Times of several kernels for the same products, beside a base: which is the fastest, and geometric means.

Kernels with equal bits may be chosen among by their times, and no result shows which it was: so the fastest of them is
what a choice by (N, K) and M could reach.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from measure import geometric_mean

BASE, FASTEST = "cuBLAS", "fastest"


@dataclass(frozen=True)
class Timing:
    """One product: microseconds by kernel, and elements whose bits are not the first kernel's."""

    layer: str
    m: int
    us: Mapping[str, float]
    unequal: Mapping[str, int] = field(default_factory=dict[str, int])

    def fastest(self, among: Sequence[str]) -> str | None:
        """The one with the least time; None when none was timed or bits differ, since then there is no choice."""
        timed = [name for name in among if name in self.us]
        return None if any(self.unequal.values()) or not timed else min(timed, key=self.us.__getitem__)

    def ratio(self, name: str, among: Sequence[str] = ()) -> float | None:
        """The base's time over that of a kernel, or of the fastest ``among`` some; None: not timed."""
        kernel = self.fastest(among) if name == FASTEST else name
        return self.us[BASE] / self.us[kernel] if kernel in self.us and BASE in self.us else None


def rows(timings: Sequence[Timing], names: Sequence[str]) -> list[list[object]]:
    """Layer, M, the base's microseconds, its time over each kernel's, the fastest, its ratio, unequal elements."""
    return [
        [
            *(t.layer, t.m, t.us.get(BASE)),
            *(t.ratio(name) for name in names),
            *(t.fastest(names), t.ratio(FASTEST, names), sum(t.unequal.values())),
        ]
        for t in timings
    ]


def means(timings: Sequence[Timing], names: Sequence[str], sizes: Sequence[int]) -> list[list[object]]:
    """For each kernel and the fastest: geometric means of the ratios by M, then of all; NaN where one is missing."""
    parts = [[t for t in timings if t.m == m] for m in sizes]
    parts.append([t for part in parts for t in part])
    return [[name, *(_mean([t.ratio(name, names) for t in part]) for part in parts)] for name in (*names, FASTEST)]


def _mean(ratios: Sequence[float | None]) -> float:
    found = [ratio for ratio in ratios if ratio is not None]
    return geometric_mean(found) if len(found) == len(ratios) else float("nan")
