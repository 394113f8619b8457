"""Signals that ask vime to end: an exception that unwinds everything, and a child that ends with its parent."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

from vime_core.interruption import forget_interruptions, interrupt

PARENT = "VIME_END_WITH"
"""Process id of the ``vime`` that started this one; set for a child only."""


@contextmanager
def taking_signals() -> Generator[None]:
    """Meanwhile SIGINT and SIGTERM raise `Interrupted` in the main thread."""
    if parent := os.environ.pop(PARENT, ""):
        from vime_core.processes import end_with_parent

        end_with_parent(int(parent))
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    taken = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    for number in taken:
        signal.signal(number, _handle)
    forget_interruptions()
    try:
        yield
    finally:
        for number, handler in taken.items():
            signal.signal(number, handler)


def _handle(number: int, frame: FrameType | None) -> None:
    del frame
    interrupt(number)
