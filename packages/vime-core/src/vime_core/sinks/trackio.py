"""trackio, local: where trackio keeps its projects (``TRACKIO_DIR``), for ``trackio show --project vime``.

Importing this module imports trackio. Nothing leaves the machine unless the environment names a ``TRACKIO_SPACE_ID``.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel

from vime_core.sinks.run import NamedRunSink, RunFacts

_trackio: Any = import_module("trackio")

PROJECT: Final = "vime"


def open_sink(options: BaseModel, directory: Path) -> NamedRunSink:
    """The factory that the registration names."""
    del options
    return NamedRunSink(directory, _start)


def _start(facts: RunFacts, name: str) -> Any:
    return _trackio.init(
        project=PROJECT,
        name=name,
        group=facts.name,
        config=dict(facts.config),
        embed=False,
        auto_log_cpu=False,
        auto_log_gpu=False,
    )
