"""Wall time by phase of a step."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager


class PhaseTimer:
    """Adds up seconds by phase name; phases may recur but not nest."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._start = time.perf_counter()

    @contextmanager
    def __call__(self, phase: str) -> Generator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def move(self, seconds: float, *, source: str, target: str) -> None:
        """Book seconds that one phase spent on behalf of another."""
        self.seconds[source] -= seconds
        self.seconds[target] = self.seconds.get(target, 0.0) + seconds

    def total(self) -> float:
        """Seconds since the timer was made."""
        return time.perf_counter() - self._start
