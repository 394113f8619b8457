"""The smallest company that still breaks something: delta debugging."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

_T = TypeVar("_T")


@dataclass(frozen=True)
class Smallest(Generic[_T]):
    """What is left. ``minimal`` says that leaving out any one more was tried and broke nothing."""

    items: tuple[_T, ...]
    trials: int
    minimal: bool


def smallest_company(
    items: Sequence[_T], breaks: Callable[[Sequence[_T]], bool], most_trials: int = 64
) -> Smallest[_T]:
    """Leave out ever smaller parts of ``items``, in order, as long as the rest still breaks.

    Source: Zeller and Hildebrandt, Simplifying and isolating failure-inducing input, 2002 (complements only).

    Args:
        items: known to break.
        breaks: whether some of them, in their order, do; never called with none.
        most_trials: calls of ``breaks`` after which the search ends where it is.
    """
    left, trials, size = list(items), 0, max(1, len(items) // 2)
    while True:
        start, found = 0, False
        while start < len(left) and len(left) > 1:
            if trials >= most_trials:
                return Smallest(tuple(left), trials, minimal=False)
            rest = left[:start] + left[start + size :]
            trials += 1 if rest else 0
            if rest and breaks(rest):
                left, found = rest, True
            else:
                start += size
        if size == 1 and not found:
            return Smallest(tuple(left), trials, minimal=True)
        size = size if found and size == 1 else max(1, size // 2)
