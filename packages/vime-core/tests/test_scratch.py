"""Temporary files of a run go with it, and those of a killed run with the next one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from vime_core.scratch import outside, run_scratch

KILLED = """
import os, sys, tempfile
from vime_core.scratch import run_scratch
with run_scratch() as directory:
    tempfile.mkstemp()
    print(directory, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch):
    with tempfile.TemporaryDirectory(prefix="v", dir="/tmp") as name:  # short, as for sockets
        monkeypatch.setenv("TMPDIR", name)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield Path(name)


def test_everything_goes_into_one_directory_that_goes(place: Path) -> None:
    with run_scratch() as directory:
        assert directory.parent == place == outside()
        assert Path(tempfile.mkdtemp()).parent == directory
        assert os.environ["TMPDIR"] == str(directory)
        with run_scratch() as inner:
            assert inner == directory
        assert directory.exists()
    assert list(place.iterdir()) == []
    assert os.environ["TMPDIR"] == str(place)
    assert tempfile.gettempdir() == str(place)


def test_it_goes_when_the_run_fails(place: Path) -> None:
    with pytest.raises(RuntimeError), run_scratch():
        raise RuntimeError
    assert list(place.iterdir()) == []


def test_a_killed_run_s_is_swept_and_a_living_one_s_is_not(place: Path) -> None:
    (place / "vime-run-of-nobody").mkdir()  # without a lock it is not ours
    with subprocess.Popen([sys.executable, "-c", KILLED], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as run:
        assert run.stdout is not None
        theirs = Path(run.stdout.readline().decode().strip())
        with run_scratch():
            assert theirs.exists(), "it is in use"
        run.send_signal(signal.SIGKILL)
    assert theirs.exists()
    with run_scratch():
        assert not theirs.exists()
    assert [path.name for path in place.iterdir()] == ["vime-run-of-nobody"]


def test_a_long_parent_is_replaced_where_sockets_would_not_fit(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = place / ("x" * 80)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    assert outside() == Path("/tmp")
