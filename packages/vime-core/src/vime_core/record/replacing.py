"""Recorded steps that are replaced by one that was done anew, so that a record is whole whenever it is looked at.

A step is a line of ``steps.jsonl`` and files of samples, which cannot appear in one moment. So the new step's files
come first, under a name that only its line leads to; then the lines change, in one moment; then the files take their
names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from blake3 import blake3

from vime_core.record.files import sync_directory, write_whole
from vime_core.record.layout import EVALUATION, SAMPLES, STEPS, evaluation_path, samples_path
from vime_core.record.points import reached

_STEP_FILES = "step-*.parquet"


def waiting_path(path: Path, line: bytes) -> Path:
    """Where a file of the step of this line lies until it has its name."""
    return path.with_name(f".{path.name}.{blake3(line).hexdigest()[:16]}")


def stored_path(path: Path, line: bytes) -> Path:
    """Where a file of the step of this line lies now."""
    waiting = waiting_path(path, line)
    return waiting if waiting.exists() else path


def replace_steps(directory: Path, kept: Iterable[bytes], line: bytes, step: int, files: Mapping[Path, bytes]) -> None:
    """Put a step in the place of every recorded one from its number on.

    Args:
        directory: the record.
        kept: the lines before it.
        line: its own.
        step: its number.
        files: contents by the names that they get.

    Raises:
        RecordError: the disk is full or refuses; the record is then what it was.
    """
    for path, data in files.items():
        path.parent.mkdir(exist_ok=True)
        write_whole(waiting_path(path, line), data)
    write_whole(directory / STEPS, b"".join((*kept, line)))
    settle(directory, step, line)


def settle(directory: Path, last: int, line: bytes) -> None:
    """Finish a replacement that came as far as its line: ``line`` of step ``last`` is the last one. Files of steps that
    have no line are removed; with ``last`` = -1 that is every step's."""
    for name, path_of in ((SAMPLES, samples_path), (EVALUATION, evaluation_path)):
        folder = directory / name
        if folder.is_dir():
            _take_name(path_of, directory, last, line)
            _remove_after(folder, last)


def _take_name(path_of: Callable[[Path, int], Path], directory: Path, last: int, line: bytes) -> None:
    path = path_of(directory, last)
    waiting = waiting_path(path, line)
    if waiting.exists():
        os.replace(waiting, path)
        reached("renamed", path)
        sync_directory(path.parent)


def _remove_after(folder: Path, last: int) -> None:
    for waiting in folder.glob(f".{_STEP_FILES}.*"):
        waiting.unlink()
    for path in sorted(folder.glob(_STEP_FILES)):
        number = re.fullmatch(r"step-([0-9]+)", path.stem)
        if number and int(number[1]) > last:
            path.unlink()
            reached("removed", path)
