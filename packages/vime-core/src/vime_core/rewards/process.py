"""One reward worker as the run sees it: a process, the pipes to it and the time it has left."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, cast

from vime_core.processes import kept
from vime_core.rewards.types import RewardSpec
from vime_core.rewards.wire import encode_spec

START_S = 120.0
"""Longest start of a worker: it imports what the reward needs."""

_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from vime_core.rewards.worker import main; main()"


class WorkerProcess:
    """A fresh Python process (not a fork) with a keeper, which kills all that it started when it ends or the run does.

    ``job`` is the index of the input that it works on; None while it starts and while it is idle.
    """

    def __init__(self, spec: RewardSpec) -> None:
        self._process = subprocess.Popen(
            kept([sys.executable, "-c", _BOOT, json.dumps(sys.path)]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"PYTHONHASHSEED": "0", **os.environ},
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self.replies = self._process.stdin, self._process.stdout
        self.starting = True
        self.job: int | None = None
        self._deadline = time.monotonic() + START_S
        self._write(encode_spec(spec))

    @property
    def idle(self) -> bool:
        """Ready for `send`."""
        return not self.starting and self.job is None

    @property
    def remaining_s(self) -> float:
        """Seconds until its time is up; infinite when it is idle."""
        return float("inf") if self.idle else max(0.0, self._deadline - time.monotonic())

    def send(self, line: bytes, job: int, timeout_s: float) -> None:
        """Hand over one input; its time runs from now."""
        self.job = job
        self._deadline = time.monotonic() + timeout_s
        self._write(line)

    def _write(self, line: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # it died: the end of its replies will say so
            self._requests.write(line)
            self._requests.flush()

    def receive(self) -> dict[str, Any] | None:
        """The reply that has arrived; None when the process ended instead."""
        line = self.replies.readline()
        return cast(dict[str, Any], json.loads(line)) if line.endswith(b"\n") else None

    def kill(self) -> int:
        """Kill the process and all that it started. Its exit status is its own where it was ending already."""
        self._process.terminate()
        status = self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._requests.close()
        self.replies.close()
        return status


def wait_for_any(workers: Sequence[WorkerProcess]) -> list[WorkerProcess]:
    """Workers with a reply or at their end; returns early, perhaps with none, when the first time limit strikes."""
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            if not worker.idle:
                selector.register(worker.replies, selectors.EVENT_READ, worker)
        timeout_s = min((worker.remaining_s for worker in workers), default=0.0)
        return [cast(WorkerProcess, key.data) for key, _ in selector.select(timeout_s)]


def describe_exit(status: int) -> str:
    """An exit status in words."""
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
