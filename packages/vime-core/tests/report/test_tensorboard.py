from __future__ import annotations

import errno
import os
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from vime_core.errors import RecordError
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


def test_a_clock_that_is_set_back_reorders_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorBoard reads files by their names, which hold the time."""
    for first, now in ((0, 2e9), (2, 1e9), (3, 1e9), (4, 3e9)):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        sink = open_sink(Options(), tmp_path)
        if first:
            sink.rewind(first)
        for step in range(first, 4):
            sink.log(step, {"reward/mean": now})
        sink.close()
    assert scalars(tmp_path / "tensorboard", "reward/mean") == [(0, 2e9), (1, 2e9), (2, 1e9), (3, 1e9)]


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = open_sink(Options(), tmp_path)

    def full(_: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(sink._writer, "write", full)
        with pytest.raises(RecordError, match=r"no space to write .*events\.out\.tfevents"):
            sink.log(0, {"reward/mean": 1.0})
    sink.close()
