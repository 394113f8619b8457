"""One writer a record: a lock that the kernel drops when its process ends, however it ends."""

from __future__ import annotations

import fcntl
import os
import weakref
from pathlib import Path

from vime_core.errors import RecordError


class DirectoryLock:
    """Holds a directory until `release`, or until nothing refers to it any more.

    Raises:
        RecordError: another process, or another writer of this one, holds it.
    """

    def __init__(self, directory: Path) -> None:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        self.release = weakref.finalize(self, os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.release()
            raise RecordError(
                f"the record {str(directory)!r} is being written by a process that still runs",
                remedy="Wait for it, or end it, before you resume its run.",
                code="VIME-RECORD-050",
            ) from error
