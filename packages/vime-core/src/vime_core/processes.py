"""Processes that must not outlive the one that needs them (Linux)."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from contextlib import suppress
from typing import Final

_PR_SET_PDEATHSIG: Final = 1

_GUARD: Final = """
import os, select, signal, sys
groups, rest = set(), b""
try:
    owner = os.pidfd_open(int(sys.argv[1]))
except ProcessLookupError:
    sys.exit()
while True:
    ready = select.select([owner, 0], [], [])[0]
    if 0 in ready:
        data = os.read(0, 65536)
        *lines, rest = (rest + data).split(b"\\n")
        for line in lines:
            (groups.add if line[:1] == b"+" else groups.discard)(int(line[1:]))
        if data:
            continue
    break
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass
"""


class GroupGuard:
    """A small process that kills groups of processes when this one is gone, however it went.

    It reads from a pipe which groups there are, and waits for this process's end on a pidfd: nothing that runs in a
    group can keep it from killing them, and it is in none of them.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _GUARD, str(os.getpid())], stdin=subprocess.PIPE, start_new_session=True
        )

    def watch(self, group: int) -> None:
        """Kill this process group when the run has ended and has not `release`-d it."""
        self._say(f"+{group}")

    def release(self, group: int) -> None:
        """The group is gone."""
        self._say(f"-{group}")

    def close(self) -> None:
        """End the guard; groups that were not released are killed."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()


def end_with_parent(parent: int, number: signal.Signals = signal.SIGTERM) -> None:
    """Let the kernel send this process a signal when its parent's thread that started it ends.

    Raises:
        OSError: the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it ended before the kernel knew
        os.kill(os.getpid(), number)
