"""An engine process ends when its driver does, however the driver ended: a killed run leaves nothing behind."""

from __future__ import annotations

import os
import select
import signal
import threading
from functools import cache


@cache
def end_with(owner: int) -> None:
    """Kill this process as soon as process ``owner`` is gone. Watches from one daemon thread, without polling."""
    try:
        descriptor = os.pidfd_open(owner)
    except ProcessLookupError:
        _end()
        return
    threading.Thread(target=_wait_and_end, args=(descriptor,), name="vime-owner-watch", daemon=True).start()


def _wait_and_end(descriptor: int) -> None:
    # A pidfd is readable once its process has ended.
    select.select([descriptor], [], [])
    _end()


def _end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
