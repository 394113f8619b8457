"""Sinks of optional packages: absent they are refused by name before a run; present they keep what was logged."""

from __future__ import annotations

import sqlite3
import tomllib
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from vime_core.config.schema import RunSection
from vime_core.errors import PluginError
from vime_core.plugins import MetricSink
from vime_core.plugins.manager import PluginManager
from vime_core.plugins.types import Options
from vime_core.record.schema import Manifest
from vime_core.sinks import Sink


def open_at(name: str, record: Path) -> Sink:
    entry = PluginManager.discover().find(MetricSink, name, field_name="run.sinks")
    return entry.load()(Options(), record)


@pytest.fixture
def record(tmp_path: Path) -> Path:
    config = {"run": {"name": "lemon", "seed": 3}}
    manifest = Manifest(vime_version="0", run_id="0123456789ab", config=config, policy="off/v1", platform={})
    (tmp_path / "manifest.json").write_text(manifest.model_dump_json())
    return tmp_path


def log_and_resume(name: str, record: Path) -> None:
    first = open_at(name, record)
    for step in range(3):
        first.log(step, {"reward/mean": step / 4})
    first.close()
    resumed = open_at(name, record)
    resumed.rewind(2)
    resumed.log(2, {"reward/mean": 0.5})
    resumed.close()


def test_tensorboard_is_a_default_sink_and_comes_with_the_command_line() -> None:
    assert RunSection().sinks == ("console", "jsonl", "tensorboard")
    metadata = tomllib.loads((Path(__file__).parents[3] / "vime-cli" / "pyproject.toml").read_text())
    assert "vime-core[tensorboard]==0.1.0" in metadata["project"]["dependencies"]


def wandb_holds(record: Path) -> bool:
    kept = list((record / "wandb").glob("offline-run-*/run-*.wandb"))
    return len(kept) == 2 and list((record / "wandb").glob("run-*")) == []


def trackio_holds(record: Path) -> bool:
    del record
    place: Path = import_module("trackio.utils").TRACKIO_DIR
    with sqlite3.connect(place / "vime.db") as database:
        rows = database.execute("select step from metrics where run_name = 'lemon-01234567-from-step-2'").fetchall()
    return rows == [(2,)]


@pytest.mark.parametrize(("name", "holds"), [("wandb", wandb_holds), ("trackio", trackio_holds)])
def test_a_sink_keeps_what_was_logged_or_names_the_package_that_is_absent(
    name: str, holds: Callable[[Path], bool], record: Path
) -> None:
    if find_spec(name) is None:
        with pytest.raises(PluginError, match=f"plugin '{name}' needs '{name}', which cannot be imported"):
            open_at(name, record)
        return
    log_and_resume(name, record)
    assert holds(record)
