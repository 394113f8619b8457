"""Runs that fail on the way: the record says so, keeps what finished, and the error names the cause. Real engines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from command import PLUGINS, ROOT, no_traceback, vime

pytestmark = [pytest.mark.slow, pytest.mark.engine]
HANGS_S = 600.0
"""After that something hangs; what is waited for takes a tenth of it on a slow machine."""


def manifest(record: Path) -> dict:
    return json.loads((record / "manifest.json").read_text())


def test_a_reward_that_raises_ends_the_run_and_is_named(smoke: Path, tmp_path: Path) -> None:
    record = tmp_path / "record"
    sets = ["--set", "plugins.modules=['rewards_that_fail']", "--set", "reward={name='raises'}"]
    ran = vime("run", smoke, "--output", record, *sets)
    no_traceback(ran)
    assert ran.code == 3, ran.text
    for part in (
        "VIME-DATA-020",
        "reward.name = 'raises' of plugins.modules",
        "prompt 0, sample 0",
        "the grader lost its key",
        "help:",
    ):
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


@pytest.fixture
def temporary():
    """A short directory for temporary files, so that sockets fit."""
    with tempfile.TemporaryDirectory(prefix="v", dir="/tmp") as name:
        yield Path(name)


def _start(temporary: Path, *arguments: str | Path) -> subprocess.Popen[str]:
    variables = {**os.environ, "PYTHONPATH": str(PLUGINS), "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)}
    command = [sys.executable, "-m", "vime_cli", *map(str, arguments)]
    return subprocess.Popen(
        command, cwd=ROOT, env=variables, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        start_new_session=True, preexec_fn=_mind_ctrl_c,
    )  # fmt: skip


def _mind_ctrl_c() -> None:
    """A shell's background job ignores SIGINT, and hands that down."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["TERM", "INT"])
def test_an_interrupted_run_says_what_it_kept(
    number: signal.Signals, code: int, smoke: Path, tmp_path: Path, temporary: Path
) -> None:
    record = tmp_path / "record"
    with _start(temporary, "run", smoke, "--output", record, "--set", "run.steps=500") as run:
        _wait_for_lines(record / "steps.jsonl", 1)
        run.send_signal(number)
        _, said = run.communicate(timeout=HANGS_S)
    assert run.returncode == code, said
    assert "Traceback" not in said
    last = said.strip().splitlines()[-1]
    steps = manifest(record)["steps"]
    assert steps >= 1
    kept = f"{steps} steps are kept in {str(record)!r}, with status 'interrupted'"
    assert last == f"interrupted by {number.name}: {kept}; go on with: vime run --resume {record}"
    assert manifest(record)["status"] == "interrupted"
    _wait_for_no_process_of(run.pid)
    assert list(temporary.iterdir()) == []
    assert not (record / "engine.log").exists()
    assert not (record / ".reserve").exists()


def test_an_interrupted_verdict_ends_its_run(smoke: Path, tmp_path: Path, temporary: Path) -> None:
    with _start(temporary, "verify", "repeat", smoke, "--directory", tmp_path / "both") as verdict:
        _wait_for(lambda: (tmp_path / "both" / "first" / "engine.log").exists())
        children = [pid for pid in _sessions_below(verdict.pid) if pid != verdict.pid]
        assert children
        verdict.terminate()
        _, said = verdict.communicate(timeout=HANGS_S)
    assert verdict.returncode == 143, said
    assert said.strip().splitlines()[-1].startswith("interrupted by SIGTERM")
    assert manifest(tmp_path / "both" / "first")["status"] == "interrupted"
    for session in children:
        _wait_for_no_process_of(session)
    assert list(temporary.iterdir()) == []


def _sessions_below(parent: int) -> set[int]:
    return {child.pid for child in psutil.Process(parent).children() if os.getsid(child.pid) == child.pid}


def _wait_for(condition) -> None:
    deadline = time.monotonic() + HANGS_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _wait_for_lines(file: Path, count: int) -> None:
    deadline = time.monotonic() + HANGS_S
    while not file.exists() or file.read_bytes().count(b"\n") < count:
        assert time.monotonic() < deadline, "the run did not get to its second step"
        time.sleep(0.1)


def _wait_for_no_process_of(session: int) -> None:
    """The engine notices that its driver is gone and ends: nothing of the run's session stays behind."""
    deadline = time.monotonic() + HANGS_S
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
