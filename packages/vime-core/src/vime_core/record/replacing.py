"""Recorded steps that are replaced by one that was done anew, so that a record is whole whenever it is looked at.

A step is a line of ``steps.jsonl``, files of samples and a folder of taps, which cannot appear in one moment. So the
new step's files come first, under names that only its line leads to; then the lines change, in one moment; then the
files take their names.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from blake3 import blake3

from vime_core.record.files import explained, make_folder, sync_directory, write_whole
from vime_core.record.layout import EVALUATION, SAMPLES, STEPS, TAPS, evaluation_path, samples_path, taps_folder
from vime_core.record.points import reached


def waiting_path(path: Path, line: bytes) -> Path:
    """Where a file, or the folder of taps, of the step of this line lies until it has its name."""
    return path.with_name(f".{path.name}.{blake3(line).hexdigest()[:16]}")


def stored_path(path: Path, line: bytes) -> Path:
    """Where a file, or the folder of taps, of the step of this line lies now."""
    waiting = waiting_path(path, line)
    return waiting if waiting.exists() else path


def write_taps(folder: Path, taps: Mapping[str, bytes]) -> None:
    """Write files of taps into the folder of their step."""
    for place in (folder.parent, folder):
        make_folder(place)
    for name, data in taps.items():
        write_whole(folder / name, data)


def replace_steps(
    directory: Path,
    kept: Iterable[bytes],
    line: bytes,
    step: int,
    files: Mapping[Path, bytes],
    taps: Mapping[str, bytes],
) -> None:
    """Put a step in the place of every recorded one from its number on; `settle` then gives its files their names.

    Args:
        directory: the record.
        kept: the lines before it.
        line: its own.
        step: its number.
        files: contents by the names that they get.
        taps: files of its taps by name.

    Raises:
        RecordError: the disk is full or refuses; the record is then what it was.
    """
    for path, data in files.items():
        write_whole(waiting_path(path, line), data)
    if taps or taps_folder(directory, step).exists():  # a step without taps takes those of the old one away
        write_taps(waiting_path(taps_folder(directory, step), line), taps)
    write_whole(directory / STEPS, b"".join((*kept, line)))


def settle(directory: Path, last: int, line: bytes) -> None:
    """Finish a replacement that came as far as its line: ``line`` of step ``last`` is the last one. Files of steps that
    have no line are removed; with ``last`` = -1 that is every step's. Raises RecordError where the disk refuses."""
    for name, path_of in ((SAMPLES, samples_path), (EVALUATION, evaluation_path), (TAPS, taps_folder)):
        folder = directory / name
        with explained(folder):
            if folder.is_dir():
                _take_name(path_of(directory, last), line)
                _remove_after(folder, last)


def _take_name(path: Path, line: bytes) -> None:
    waiting = waiting_path(path, line)
    if not waiting.exists():
        return
    if path.is_dir():  # unlike a file, a folder is not replaced by one that takes its name
        _remove(path)
    os.replace(waiting, path)
    reached("renamed", path)
    sync_directory(path.parent)


def _remove_after(folder: Path, last: int) -> None:
    for waiting in folder.glob(".step-*.*"):
        _remove(waiting)
    for path in sorted(folder.glob("step-*")):
        number = re.fullmatch(r"step-([0-9]+)", path.stem)
        if number and int(number[1]) > last:
            _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    reached("removed", path)
