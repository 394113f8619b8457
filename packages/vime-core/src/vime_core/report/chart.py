"""Line charts as inline SVG: no script, no font, no network; colours come from the page's style."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Final

WIDTH: Final = 360
HEIGHT: Final = 180
LEFT: Final = 64
BOTTOM: Final = 22
TOP: Final = 8

Points = Sequence[tuple[int, float]]


def chart(title: str, series: Mapping[str, Points]) -> str:
    """A figure with one line a series over steps. A value that is not finite breaks its line and is counted below.

    Args:
        title: of the figure.
        series: (step, value) pairs by name, in the order of steps.
    """
    finite = [(step, value) for points in series.values() for step, value in points if math.isfinite(value)]
    broken = sum(not math.isfinite(value) for points in series.values() for _, value in points)
    if not finite:
        body = "<p>no finite value</p>"
    else:
        steps, values = [step for step, _ in finite], [value for _, value in finite]
        scale = _Scale(min(steps), max(steps), min(values), max(values))
        lines = "".join(_line(scale, points, number) for number, points in enumerate(series.values()))
        body = (
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{_frame(scale)}{lines}</svg>'
        )
    names = "".join(f'<span class="s{i}">{escape(name)}</span>' for i, name in enumerate(series))
    legend = f'<p class="legend">{names}</p>' if len(series) > 1 else ""
    note = f'<p class="bad">{broken} values are not finite</p>' if broken else ""
    return f"<figure><figcaption>{escape(title)}</figcaption>{body}{legend}{note}</figure>"


class _Scale:
    """From (step, value) to the drawing's coordinates; a range of nothing is widened."""

    def __init__(self, first: int, last: int, low: float, high: float) -> None:
        self.first, self.last, self.low, self.high = first, last, low, high

    def x(self, step: int) -> float:
        return LEFT + (step - self.first) / (self.last - self.first or 1) * (WIDTH - LEFT - 8)

    def y(self, value: float) -> float:
        room = HEIGHT - BOTTOM - TOP
        low = 0.5 * self.low  # of halves, since the difference of two finite values may be none
        if (spread := 0.5 * self.high - low) == 0.0:
            return TOP + room / 2
        return TOP + room - (0.5 * value - low) / spread * room


def _line(scale: _Scale, points: Points, number: int) -> str:
    """Connected points; a single one, which no line shows, is a dot."""
    parts: list[list[str]] = [[]]
    for step, value in points:
        if math.isfinite(value):
            parts[-1].append(f"{scale.x(step):.1f},{scale.y(value):.1f}")
        else:
            parts.append([])
    lines = [f'<polyline class="s{number}" points="{" ".join(part)}"/>' for part in parts if len(part) > 1]
    dots = [_dot(part[0], number) for part in parts if len(part) == 1]
    return "".join(lines + dots)


def _dot(place: str, number: int) -> str:
    x, y = place.split(",")
    return f'<circle class="s{number}" cx="{x}" cy="{y}" r="2.5"/>'


def _frame(scale: _Scale) -> str:
    base = HEIGHT - BOTTOM
    marks = [(scale.low, base)] if scale.low == scale.high else [(scale.low, base), (scale.high, TOP + 8)]
    labels = "".join(
        f'<text x="{LEFT - 6}" y="{y}" text-anchor="end">{escape(f"{value:.3g}")}</text>' for value, y in marks
    )
    return (
        f'<path class="frame" d="M{LEFT} {TOP}V{base}H{WIDTH - 8}"/>{labels}'
        f'<text x="{LEFT}" y="{HEIGHT - 6}">{scale.first}</text>'
        f'<text x="{WIDTH - 8}" y="{HEIGHT - 6}" text-anchor="end">step {scale.last}</text>'
    )
