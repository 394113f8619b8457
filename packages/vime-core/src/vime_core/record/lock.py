"""One writer a record: a lock that the kernel drops when its process ends, however it ends."""

from __future__ import annotations

import fcntl
import os
import weakref
from pathlib import Path

from vime_core.errors import RecordError
from vime_core.record.files import explained


class DirectoryLock:
    """Holds a directory until `release`, or until nothing refers to it any more.

    Raises:
        RecordError: another process, or another writer of this one, holds it; or it cannot be held.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        with explained(directory):
            self._descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
            self.release = weakref.finalize(self, os.close, self._descriptor)
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                self.release()
                raise RecordError(
                    f"the record {str(directory)!r} is being written by a process that still runs",
                    remedy="Wait for it, or end it, before you resume its run.",
                    code="VIME-RECORD-050",
                ) from error

    def in_place(self) -> bool:
        """Whether the directory still has the name by which it was locked."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), self._directory.stat())
        except OSError:
            return False

    def require_place(self) -> None:
        """Raise RecordError when the directory was moved, removed or replaced by another."""
        if not self.in_place():
            raise RecordError(
                f"run.output = {str(self._directory)!r} was moved or removed while the run wrote its record there",
                remedy="Where it was moved, go on with it there: vime run --resume RUN.",
                code="VIME-RECORD-059",
            )
