"""Write points: the moments at which what is on disk has just changed. A process that dies at any of them must leave
something that a later one can go on from; tests stop a run at each."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

Observer = Callable[[str, Path], None]
"""Called with the point's name and the path that was just changed."""

_observers: list[Observer] = []


def reached(point: str, path: Path) -> None:
    """Say that a write point was reached."""
    for observer in _observers:
        observer(point, path)


@contextmanager
def observed(observer: Observer) -> Generator[None]:
    """Call ``observer`` at every write point of this process meanwhile."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)
