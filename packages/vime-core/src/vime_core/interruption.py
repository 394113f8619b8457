"""Signals that end a run, kept out of what must happen whole: a step is recorded, or it is not."""

from __future__ import annotations

import signal
from collections.abc import Generator
from contextlib import contextmanager

from vime_core.errors import Interrupted

_waiting: list[signal.Signals] = []
_told: list[signal.Signals] = []
_depth = 0


def forget_interruptions() -> None:
    """What was told before is nothing to `require_going_on`: another command of this process begins."""
    _told.clear()


def interrupt(number: int) -> None:
    """What a handler of SIGINT or SIGTERM does: raise Interrupted, now or at the end of `uninterrupted`."""
    _told.append(signal.Signals(number))
    if _depth:
        _waiting.append(signal.Signals(number))
    else:
        raise _interrupted(signal.Signals(number))


@contextmanager
def uninterrupted() -> Generator[None]:
    """An interruption during the block is raised after it. For the main thread, where handlers run."""
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
    if _waiting and not _depth:
        number = _waiting[0]
        _waiting.clear()
        raise _interrupted(number)


def require_going_on() -> None:
    """Raise the Interrupted that was raised before and lost: Python drops what is raised in a destructor, and a library
    what is raised in its callback."""
    if _told:
        raise _interrupted(_told[0])


def _interrupted(number: signal.Signals) -> Interrupted:
    return Interrupted(number.name, 128 + number)
