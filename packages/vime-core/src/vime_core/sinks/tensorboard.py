"""TensorBoard event files below ``tensorboard/`` in the record directory. Importing this module imports tensorboard."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel

from vime_core.record.files import explained

_writer: Any = import_module("tensorboard.summary.writer.record_writer")
_events: Any = import_module("tensorboard.compat.proto.event_pb2")
_summaries: Any = import_module("tensorboard.compat.proto.summary_pb2")

_PREFIX: Final = "events.out.tfevents."


class TensorBoardSink:
    """One scalar a metric a step. Raises RecordError when it cannot be written."""

    def __init__(self, directory: Path) -> None:
        with explained(directory):
            directory.mkdir(exist_ok=True)
            self._file = directory / f"{_PREFIX}{_second(directory):010d}.{platform.node()}.{os.getpid()}"
            self._writer = _writer.RecordWriter(self._file.open("xb"))
        self._add(0, file_version="brain.Event:2")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [_summaries.Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._add(step, summary=_summaries.Summary(value=values))

    def rewind(self, step: int) -> None:
        """TensorBoard forgets what it was told from the step of a session's start on."""
        self._add(step, session_log=_events.SessionLog(status=_events.SessionLog.START))

    def close(self) -> None:
        with suppress(OSError):  # every event was flushed, and what could not be was told then
            self._writer.close()

    def _add(self, step: int, **what: Any) -> None:
        with explained(self._file):
            self._writer.write(_events.Event(wall_time=time.time(), step=step, **what).SerializeToString())
            self._writer.flush()


def _second(directory: Path) -> int:
    """What a new file is named by. TensorBoard reads files by name: one of a resumed run must come after those that are
    there, also when the clock was set back meanwhile."""
    names = (path.name.removeprefix(_PREFIX).partition(".")[0] for path in directory.glob(f"{_PREFIX}*"))
    return max([int(time.time()), *(int(name) + 1 for name in names if name.isdecimal())])


def open_sink(options: BaseModel, directory: Path) -> TensorBoardSink:
    """The factory that the registration names."""
    del options
    return TensorBoardSink(directory / "tensorboard")
