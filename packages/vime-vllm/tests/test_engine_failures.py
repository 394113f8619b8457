"""A live engine that dies or hangs is an error with its cause, in time, and leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch import Tensor

from vime_core.backends import RolloutContext
from vime_core.errors import BackendError
from vime_core.types import SampleRequest
from vime_vllm.memory import shared_memory_in_use
from vime_vllm.options import VllmOptions
from vime_vllm.rollout import VllmRollout

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture
def rollout(
    make_context: Callable[..., RolloutContext],
    opened: Callable[[RolloutContext], AbstractContextManager[VllmRollout]],
    model_directory: Path,
) -> Iterator[VllmRollout]:
    with opened(make_context(VllmOptions(kv_cache_gib=0.25), directory=model_directory)) as made:
        yield made
    shutil.rmtree(made.engine.log.parent, ignore_errors=True)


def _process(rollout: VllmRollout, kind: str) -> int:
    return next(report.pid for report in rollout.processes() if report.settings["process"] == kind)


def _left(rollout: VllmRollout) -> list[int]:
    """Processes of the engine that still run; one that nobody has buried yet does not."""
    return [process.pid for process in map(_running, rollout.engine.pids) if process is not None]


def _running(pid: int) -> psutil.Process | None:
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process
    except psutil.NoSuchProcess:
        return None


def test_a_killed_engine_core(rollout: VllmRollout, make_requests: Callable[..., list[SampleRequest]]) -> None:
    core = _process(rollout, "engine core")
    threading.Timer(0.2, lambda: os.kill(core, signal.SIGKILL)).start()
    with pytest.raises(BackendError, match=f"died during generate: process {core} was ended by SIGKILL") as caught:
        rollout.generate(make_requests(40, max_tokens=200))
    assert str(rollout.engine.log) in caught.value.remedy
    assert rollout.engine.log.is_file(), "the log stays for the user"
    assert _left(rollout) == []
    with pytest.raises(BackendError, match="has ended"):
        rollout.generate(make_requests(1))
    rollout.close()


def test_a_worker_that_hangs_in_an_update(rollout: VllmRollout, weights: dict[str, Tensor], monkeypatch: Any) -> None:
    worker = _process(rollout, "worker")
    monkeypatch.setattr(rollout.engine._supervisor, "_timeout_s", 2.0)
    os.kill(worker, signal.SIGSTOP)
    with pytest.raises(BackendError, match=r"did not answer vime_update_weights within .* = 2 s") as caught:
        rollout.update_weights(iter(weights.items()), 1)
    assert f"{worker} stopped" in caught.value.message
    assert _left(rollout) == []
    assert shared_memory_in_use() == []
    with pytest.raises(BackendError):
        rollout.weight_digests()
