"""A run that is killed leaves no reward worker behind, nor what a reward started, whatever the reward is doing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

REWARD = """
import ctypes, os, pathlib, subprocess, sys

def make_busy(options):
    def score(item):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        note = pathlib.Path(item.response_text)
        note.with_suffix(".part").write_text(f"{os.getpid()} {child.pid}")
        note.with_suffix(".part").rename(note)
        ctypes.PyDLL(None).sleep(600)  # keeps the interpreter's lock
        return 0.0
    return score
"""
DRIVER = """
import sys
from vime_core.data.types import Example, Message
from vime_core.rewards.pool import RewardPool
from vime_core.rewards.types import RewardInput, RewardSpec

item = RewardInput("p", sys.argv[1], Example((Message("user", "p"),), "1", {}))
RewardPool(RewardSpec("busy_reward:make_busy"), timeout_s=600).score([item])
"""


def wait_for(condition, what: str):
    deadline = time.monotonic() + 120
    while not (result := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.05)
    return result


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_killed_run_leaves_no_worker_and_no_child_of_one(tmp_path: Path) -> None:
    (tmp_path / "busy_reward.py").write_text(REWARD)
    note = tmp_path / "pids"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", DRIVER, str(note)], env=environment) as driver:
        wait_for(note.exists, "the reward did not start")
        pids = [int(pid) for pid in note.read_text().split()]
        assert all(map(runs, pids))
        driver.send_signal(signal.SIGKILL)
    wait_for(lambda: not any(map(runs, pids)), "a process of the reward survived its run")
