"""TensorBoard event files below ``tensorboard/`` in the record directory. Importing this module imports tensorboard."""

from __future__ import annotations

import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import BaseModel

_writer: Any = import_module("tensorboard.summary.writer.event_file_writer")
_events: Any = import_module("tensorboard.compat.proto.event_pb2")
_summaries: Any = import_module("tensorboard.compat.proto.summary_pb2")


class TensorBoardSink:
    """One scalar a metric a step."""

    def __init__(self, directory: Path) -> None:
        self._writer = _writer.EventFileWriter(str(directory))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [_summaries.Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._add(step, summary=_summaries.Summary(value=values))

    def rewind(self, step: int) -> None:
        """TensorBoard forgets what it was told from the step of a session's start on."""
        self._add(step, session_log=_events.SessionLog(status=_events.SessionLog.START))

    def close(self) -> None:
        self._writer.close()

    def _add(self, step: int, **what: Any) -> None:
        self._writer.add_event(_events.Event(wall_time=time.time(), step=step, **what))
        self._writer.flush()


def open_sink(options: BaseModel, directory: Path) -> TensorBoardSink:
    """The factory that the registration names."""
    del options
    return TensorBoardSink(directory / "tensorboard")
