"""trackio, local: where trackio keeps its projects (``TRACKIO_DIR``), for ``trackio show --project vime``.

Importing this module imports trackio. Nothing leaves the machine unless the environment names a ``TRACKIO_SPACE_ID``.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel

from vime_core.sinks.run import run_facts

_trackio: Any = import_module("trackio")

PROJECT: Final = "vime"


class TrackioSink:
    """A run of trackio, and another one of the same group each time that the run is resumed."""

    def __init__(self, directory: Path) -> None:
        self._facts = run_facts(directory)
        self._run: Any = None
        self._first_step = 0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._run is None:
            self._run = self._open()
        self._run.log(dict(metrics), step=step)

    def rewind(self, step: int) -> None:
        self.close()
        self._first_step = step

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None

    def _open(self) -> Any:
        return _trackio.init(
            project=PROJECT,
            name=self._facts.named(self._first_step),
            group=self._facts.name,
            config=dict(self._facts.config),
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )


def open_sink(options: BaseModel, directory: Path) -> TrackioSink:
    """The factory that the registration names."""
    del options
    return TrackioSink(directory)
