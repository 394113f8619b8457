"""How a record is written to disk: whole files appear at once, lines are appended whole, and all of it is synced.

Every failure becomes a RecordError that names the path; a full disk also says how much is free.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shlex
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, cast

from vime_core.errors import RecordError
from vime_core.record.layout import MANIFEST
from vime_core.record.points import reached

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
UNFINISHED: Final = ".unfinished"


def refuse_existing(directory: Path) -> None:
    """Raise RecordError when there is something where a record is to be written."""
    if directory.exists() or directory.is_symlink():
        raise _exists(directory)


def _exists(directory: Path) -> RecordError:
    if _stopped(directory):
        command = resume_command(directory)
        return RecordError(
            f"run.output = {str(directory)!r} exists already, and its run did not come to its end",
            remedy=f"Go on with it: {command}. Or choose another run.output, or move the old record away.",
            code="VIME-RECORD-001",
        )
    return RecordError(
        f"run.output = {str(directory)!r} exists already, and a record is never overwritten",
        remedy="Choose another run.output, or move the old record away.",
        code="VIME-RECORD-001",
    )


def resume_command(directory: Path) -> str:
    """What goes on with a run that was stopped, as a shell takes it."""
    return f"vime run --resume {shlex.quote(str(directory))}"


def _stopped(directory: Path) -> bool:
    """Whether there is a record here whose run did not come to its end."""
    try:
        found: object = json.loads((directory / MANIFEST).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    status = cast("dict[str, object]", found).get("status") if isinstance(found, dict) else None
    return status in ("running", "failed", "interrupted")


def refuse_unwritable(directory: Path) -> None:
    """Raise RecordError when a record cannot be made there, which is tried beside it; nothing stays."""
    with explained(directory):
        refuse_existing(directory)
        parent = next(path for path in directory.absolute().parents if path.exists())
        if not parent.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{str(parent)!r} is no directory")
        probe = parent / f".vime-{secrets.token_hex(8)}"
        probe.mkdir()
        probe.rmdir()


def create_directory(directory: Path) -> None:
    """Make a directory that must not exist, with its parents."""
    with explained(directory):
        refuse_existing(directory)
        directory.parent.mkdir(parents=True, exist_ok=True)
        try:
            directory.mkdir()
        except FileExistsError as error:  # by another process, since it was looked at
            raise _exists(directory) from error
        try:
            reached("created", directory)
            sync_directory(directory.parent)
        except BaseException:
            directory.rmdir()
            raise


def make_folder(folder: Path) -> None:
    """Make a folder of a record, where it is not there yet; the one above it must be there, else it was taken away."""
    with explained(folder):
        if not folder.is_dir():
            folder.mkdir()
            sync_directory(folder.parent)


def write_whole(path: Path, data: bytes) -> None:
    """Write or replace a file so that a reader sees the old bytes or the new ones, also after a crash."""
    unfinished = path.with_name(f".{path.name}{UNFINISHED}")
    with explained(path):
        try:
            descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            try:
                _write_and_sync(descriptor, data, unfinished)
            finally:
                os.close(descriptor)
            os.replace(unfinished, path)
            reached("renamed", path)
            sync_directory(path.parent)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise


def append_whole(path: Path, data: bytes, size: int | None = None) -> None:
    """Append to a file, which must have its ``size`` where that is known; when it fails, cut it back to that."""
    with explained(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            before = os.fstat(descriptor).st_size
            if size not in (None, before):
                raise OSError(errno.ESTALE, f"it has {before} bytes, and the run wrote {size}; somebody changed it")
            try:
                _write_and_sync(descriptor, data, path)
                if before == 0:
                    sync_directory(path.parent)
            except BaseException:
                os.ftruncate(descriptor, before)
                raise
        finally:
            os.close(descriptor)


def cut_file(path: Path, size: int) -> None:
    """Cut a file back to its first ``size`` bytes."""
    with explained(path):
        descriptor = os.open(path, os.O_WRONLY)
        try:
            os.ftruncate(descriptor, size)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        reached("cut", path)


def remove_unfinished(directory: Path) -> None:
    """Remove what a process that was killed within `write_whole` left in a directory."""
    with explained(directory):
        for path in directory.glob(f".*{UNFINISHED}"):
            path.unlink()


def remove(path: Path) -> None:
    """Remove a file, if it is there."""
    with explained(path):
        path.unlink(missing_ok=True)


def reserve(path: Path, size: int) -> None:
    """Make ``path`` hold at least ``size`` bytes of disk, which deleting it gives back."""
    with explained(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.posix_fallocate(descriptor, 0, max(size, 1))
        finally:
            os.close(descriptor)


def _write_and_sync(descriptor: int, data: bytes, path: Path) -> None:
    """Write in two halves: each is a write point, so that a test can leave half a file behind."""
    reached("opened", path)
    middle = len(data) // 2
    for part in (data[:middle], data[middle:]):
        _write(descriptor, part)
        reached("written", path)
    os.fsync(descriptor)


def _write(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def sync_directory(directory: Path) -> None:
    """Put a directory's names on disk."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def explained(path: Path) -> Generator[None, None, None]:
    """What the system refuses meanwhile becomes a RecordError that names the path."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_SPACE:
            raise RecordError(
                f"no space to write {str(path)!r}: {free_bytes(path)} bytes are free there",
                remedy="Free space, or choose a run.output on a larger disk; the steps recorded so far are whole.",
                code="VIME-RECORD-002",
            ) from error
        raise RecordError(
            f"cannot write {str(path)!r}: {error.strerror or error}",
            remedy="Check the path and its permissions, or choose another run.output.",
            code="VIME-RECORD-003",
        ) from error


def free_bytes(path: Path) -> int:
    """Bytes that are free where a path lies or would lie."""
    existing = next((parent for parent in path.parents if parent.exists()), Path("/"))
    return shutil.disk_usage(existing).free
