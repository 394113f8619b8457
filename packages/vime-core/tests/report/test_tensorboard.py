from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from vime_core.plugins.types import Options
from vime_core.sinks.tensorboard import open_sink


def scalars(directory: Path, name: str) -> list[tuple[int, float]]:
    module: Any = import_module("tensorboard.backend.event_processing.event_accumulator")
    events = module.EventAccumulator(str(directory))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_what_was_logged_is_read_back_and_a_rewind_forgets(tmp_path: Path) -> None:
    sink = open_sink(Options(), tmp_path)
    for step in range(4):
        sink.log(step, {"reward/mean": step / 4})
    sink.close()
    assert scalars(tmp_path / "tensorboard", "reward/mean") == [(i, i / 4) for i in range(4)]
    resumed = open_sink(Options(), tmp_path)
    resumed.rewind(2)
    resumed.log(2, {"reward/mean": 9.0})
    resumed.close()
    assert scalars(tmp_path / "tensorboard", "reward/mean") == [(0, 0.0), (1, 0.25), (2, 9.0)]
