"""Standard output and standard error that end the command when nobody takes what they write."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, TextIO, cast

from vime_core.errors import BackendError, Interrupted

SIGPIPE_CODE = 128 + 13
"""Exit code of what a closed pipe ends, as shells have it."""


class StreamLost(Interrupted):
    """A standard stream takes nothing any more: its reader is gone, or its disk is full.

    Args:
        name: which stream.
        cause: what the system said.
    """

    def __init__(self, name: str, cause: OSError) -> None:
        self.closed = isinstance(cause, BrokenPipeError)
        super().__init__("SIGPIPE", SIGPIPE_CODE if self.closed else BackendError.exit_code)
        self.said = f"{name} cannot be written: {cause.strerror or cause}"

    def as_error(self) -> BackendError:
        """What a person reads of it."""
        return BackendError(self.said, remedy="Make room, or send it elsewhere.", code="VIME-CLI-004")


class _Checked:
    """A text stream that raises `StreamLost` once, in the main thread; what follows is written nowhere."""

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream, self._name = stream, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._lose(error)
            return len(text)

    def writelines(self, lines: list[str]) -> None:
        self.write("".join(lines))

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._lose(error)

    def _lose(self, cause: OSError) -> None:
        """What unwinds now may write too, and Python flushes at its end: both must not fail again."""
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, self._stream.fileno())
        os.close(nothing)
        if threading.current_thread() is threading.main_thread():
            raise StreamLost(self._name, cause) from cause


@contextmanager
def checked_streams() -> Generator[None]:
    """Meanwhile a standard stream that cannot be written raises `StreamLost`; at the end both are flushed."""
    before = sys.stdout, sys.stderr
    # Python has None for a stream that was closed before it started; print then does nothing.
    sys.stdout = before[0] and cast(TextIO, _Checked(before[0], "standard output"))
    sys.stderr = before[1] and cast(TextIO, _Checked(before[1], "standard error"))
    try:
        yield
        print(end="", flush=True)
        print(end="", flush=True, file=sys.stderr)
    finally:
        sys.stdout, sys.stderr = before
