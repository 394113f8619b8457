"""One directory for every temporary file of a run: gone when it ends, swept by the next run when it was killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

_PREFIX: Final = "vime-run-"
_LOCK: Final = "lock"
_LONGEST: Final = 60
"""Characters of the directory's parent: sockets in it must have names of at most 107."""

_open: list[Path] = []


@contextmanager
def run_scratch() -> Generator[Path]:
    """Make ``TMPDIR`` of this process and of those that it starts a fresh directory; remove it at the end.

    Inside of another one nothing changes. A lock that the kernel drops with this process says whether it is in use.
    """
    if _open:
        yield _open[0]
        return
    parent = outside()
    _sweep(parent)
    directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    before = os.environ.get("TMPDIR"), tempfile.tempdir
    with (directory / _LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _open.append(directory)
        os.environ["TMPDIR"] = tempfile.tempdir = str(directory)
        try:
            yield directory
        finally:
            _open.clear()
            _restore(*before)
            shutil.rmtree(directory, ignore_errors=True)


def outside() -> Path:
    """The directory for temporary files that outlive a run."""
    if _open:
        return _open[0].parent
    usual = Path(tempfile.gettempdir())
    return usual if len(str(usual)) <= _LONGEST else Path("/tmp")


def _restore(variable: str | None, module: str | None) -> None:
    tempfile.tempdir = module
    if variable is None:
        os.environ.pop("TMPDIR", None)
    else:
        os.environ["TMPDIR"] = variable


def _sweep(parent: Path) -> None:
    """Remove what killed runs of this user left: directories whose lock nobody holds."""
    for directory in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if directory.is_symlink() or directory.stat().st_uid != os.getuid():
                continue
            with (directory / _LOCK).open("r") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory, ignore_errors=True)
