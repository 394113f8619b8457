"""Processes that must not outlive the one that needs them (Linux)."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from typing import Final

_PR_SET_PDEATHSIG: Final = 1

# It ends by os._exit: the interpreter's own way out first gives SIGTERM its default back, so that one which arrives in
# those milliseconds would stand for the command's exit status.
_KEEPER: Final = """
import ctypes, os, resource, select, signal, sys, time
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
try:
    owner = os.pidfd_open(int(sys.argv[1]))
except ProcessLookupError:
    sys.exit()
libc = ctypes.CDLL(None)
if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
    sys.exit("prctl(PR_SET_CHILD_SUBREAPER) is refused")
told, tell = os.pipe()
os.set_blocking(tell, False)
signal.set_wakeup_fd(tell)
signal.signal(signal.SIGTERM, lambda *_: None)
kept = os.fork()
if kept == 0:
    os.setsid()
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.execv(sys.argv[2], sys.argv[2:])
nothing = os.open(os.devnull, os.O_RDWR)
os.dup2(nothing, 0)
os.dup2(nothing, 1)
select.select([owner, os.pidfd_open(kept), told], [], [])
status = 0
while True:
    with open("/proc/thread-self/children") as children:
        for child in children.read().split():
            os.kill(int(child), signal.SIGKILL)
    try:
        ended, found = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        break
    if ended == kept:
        status = os.waitstatus_to_exitcode(found)
    elif ended == 0:
        time.sleep(0.001)
if status < 0:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if -status != signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
"""


def kept(command: Sequence[str]) -> list[str]:
    """The command below a keeper, a small process that leaves nothing behind of what the command started.

    When the command ends, when the keeper gets SIGTERM, or when this process is gone, however it went, the keeper kills
    the command and everything below it, sessions of their own and daemons included (they become the keeper's children
    when their parents end: it is a subreaper), and ends as the command did. The keeper's standard streams, environment
    and working directory are the command's, which begins a session.
    """
    return [sys.executable, "-I", "-S", "-c", _KEEPER, str(os.getpid()), *command]


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
