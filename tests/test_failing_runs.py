"""Runs that fail on the way: the record says so, keeps what finished, and the error names the cause. Real engines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command import PLUGINS, ROOT, no_traceback, vime

pytestmark = [pytest.mark.slow, pytest.mark.engine]


def manifest(record: Path) -> dict:
    return json.loads((record / "manifest.json").read_text())


def test_a_reward_that_raises_ends_the_run_and_is_named(smoke: Path, tmp_path: Path) -> None:
    record = tmp_path / "record"
    sets = ["--set", "plugins.modules=['rewards_that_fail']", "--set", "reward={name='raises'}"]
    ran = vime("run", smoke, "--output", record, *sets)
    no_traceback(ran)
    assert ran.code == 2, ran.text
    for part in ("VIME-DATA-020", "prompt 0, sample 0", "the grader lost its key", "help:"):
        assert part in ran.err
    assert manifest(record)["status"] == "failed"
    assert "the grader lost its key" in manifest(record)["error"]


def test_a_killed_run_leaves_a_record_of_what_finished(smoke: Path, tmp_path: Path) -> None:
    record = tmp_path / "record"
    command = [sys.executable, "-m", "vime_cli", "run", str(smoke), "--output", str(record), "--set", "run.steps=500"]
    variables = {**os.environ, "PYTHONPATH": str(PLUGINS), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=ROOT, env=variables, stderr=subprocess.DEVNULL, start_new_session=True) as run:
        _wait_for_lines(record / "steps.jsonl", 2)
        os.kill(run.pid, signal.SIGKILL)
        run.wait()
    assert manifest(record)["status"] == "running"
    steps = (record / "steps.jsonl").read_text().splitlines()
    ran = vime("diff", record, record)
    no_traceback(ran)
    assert len(steps) >= 2
    _wait_for_no_process_of(run.pid)


def _wait_for_lines(file: Path, count: int) -> None:
    deadline = time.monotonic() + 120
    while not file.exists() or file.read_bytes().count(b"\n") < count:
        assert time.monotonic() < deadline, "the run did not get to its second step"
        time.sleep(0.1)


def _wait_for_no_process_of(session: int) -> None:
    """The engine notices that its driver is gone and ends: nothing of the run's session stays behind."""
    deadline = time.monotonic() + 60
    while _alive(session):
        assert time.monotonic() < deadline, f"processes of session {session} are still there"
        time.sleep(0.5)


def _alive(session: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(entry.name))
    return found
