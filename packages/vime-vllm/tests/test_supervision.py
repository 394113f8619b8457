"""A call ends with its result, the cause of a death, or the time limit; nothing stays behind."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import platform
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from vime_core.errors import BackendError, ConfigError
from vime_vllm.supervision import Supervisor

LONG_S = 120.0
"""A time limit that no test comes to on the slowest machine, and time that no death leaves to a call."""


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    made = Supervisor(timeout_s=LONG_S, log=tmp_path / "engine.log")
    yield made
    made.kill()


def _engine(supervisor: Supervisor) -> Any:
    """A stand-in for an engine core: a process that sleeps."""
    core = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), daemon=True)
    core.start()
    supervisor.adopt([core])
    return core


def test_a_result_comes_through(supervisor: Supervisor) -> None:
    core = _engine(supervisor)
    assert supervisor.call("generate", lambda: 42) == 42
    assert supervisor.pids == supervisor.alive() == [core.pid]


def test_an_exception_becomes_a_backend_error_and_ends_the_engine(supervisor: Supervisor) -> None:
    core = _engine(supervisor)
    with pytest.raises(BackendError, match="failed in generate: no such token"):
        supervisor.call("generate", lambda: (_ for _ in ()).throw(ValueError("no such token")))
    assert not core.is_alive()


def test_an_engine_without_gpu_memory_is_told_what_needs_less(supervisor: Supervisor) -> None:
    _engine(supervisor)
    used_up = RuntimeError("CUDA out of memory. Tried to allocate 152.00 MiB. GPU 0 has 73.50 MiB free.")
    with pytest.raises(BackendError, match="failed in generate: CUDA out of memory") as caught:
        supervisor.call("generate", lambda: (_ for _ in ()).throw(used_up))
    assert "engine.log; it ran out of GPU memory: Lower trainer.token_budget" in str(caught.value.remedy)


def test_vime_s_own_error_stays_what_it_is(supervisor: Supervisor) -> None:
    core = _engine(supervisor)
    wrong = ConfigError("wrong", remedy="right")
    with pytest.raises(ConfigError):
        supervisor.call("generate", lambda: (_ for _ in ()).throw(wrong))
    assert core.is_alive()


def test_a_death_is_told_with_its_signal_and_the_log(supervisor: Supervisor, tmp_path: Path) -> None:
    core = _engine(supervisor)
    log = tmp_path / "engine.log"
    log.write_text("long ago\n")

    def die() -> None:
        with log.open("a") as file:
            file.write("\n".join(f"line {place}" for place in range(100)))
        os.kill(core.pid, signal.SIGKILL)
        time.sleep(2 * LONG_S)

    with pytest.raises(BackendError, match=f"died during generate: process {core.pid} was ended by SIGKILL") as caught:
        supervisor.call("generate", die)
    assert "| line 99" in caught.value.message
    assert "line 80" not in caught.value.message
    assert "long ago" not in caught.value.message
    assert str(log) in caught.value.remedy


def test_an_exit_code_is_told(supervisor: Supervisor) -> None:
    core = multiprocessing.get_context("fork").Process(target=os._exit, args=(3,), daemon=True)
    core.start()
    supervisor.adopt([core])
    with pytest.raises(BackendError, match=f"process {core.pid} exited with code 3"):
        supervisor.call("generate", lambda: time.sleep(2 * LONG_S))


def _end_thread_by_thread() -> None:
    """The first thread ends, so that the process counts as a zombie; another one lives on and gets the signal."""
    threading.Thread(target=lambda: (time.sleep(0.5), os.kill(os.getpid(), signal.SIGKILL))).start()
    ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)


def test_the_signal_is_told_where_threads_outlast_the_first_one(supervisor: Supervisor) -> None:
    core = multiprocessing.get_context("fork").Process(target=_end_thread_by_thread, daemon=True)
    core.start()
    supervisor.adopt([core])

    def fail() -> None:
        while supervisor.alive():
            time.sleep(0.01)
        raise RuntimeError("the engine core is dead")

    with pytest.raises(BackendError, match=f"died during generate: process {core.pid} was ended by SIGKILL"):
        supervisor.call("generate", fail)


def test_a_hang_ends_at_the_limit_with_the_states(tmp_path: Path) -> None:
    supervisor = Supervisor(timeout_s=0.5, log=tmp_path / "engine.log")
    core = _engine(supervisor)
    os.kill(core.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, core.pid, os.WSTOPPED | os.WNOWAIT)
    with pytest.raises(BackendError, match=r"did not answer generate within rollout.timeout_s = 0.5 s") as caught:
        supervisor.call("generate", lambda: time.sleep(LONG_S))
    assert f"{core.pid} stopped" in caught.value.message
    assert not psutil.pid_exists(core.pid)


def test_a_failed_start_ends_what_it_started_and_nothing_else(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    bystander = context.Process(target=time.sleep, args=(600,), daemon=True)
    bystander.start()
    supervisor = Supervisor(timeout_s=LONG_S, log=tmp_path / "engine.log")
    started = context.Process(target=time.sleep, args=(600,), daemon=True)

    def start() -> None:
        started.start()
        raise RuntimeError("Engine core initialization failed")

    with pytest.raises(BackendError, match="failed in start: Engine core initialization failed"):
        supervisor.call("start", start)
    started.join(timeout=LONG_S)
    assert not started.is_alive()
    assert bystander.is_alive()
    bystander.kill()


def test_processes_that_came_later_are_not_the_engine_s(supervisor: Supervisor) -> None:
    core = _engine(supervisor)
    bystander = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), daemon=True)
    bystander.start()
    supervisor.kill()
    assert not core.is_alive()
    assert bystander.is_alive()
    bystander.kill()


HIDDEN = "Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': -9}"


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (f"(EngineCore pid=7) ERROR ... ValueError: too few blocks\nRuntimeError: {HIDDEN}\n", "too few blocks"),
        ("INFO starting\n", "its core was ended by SIGKILL"),
    ],
    ids=["written", "killed"],
)
def test_a_failed_start_names_its_cause(log: str, cause: str, tmp_path: Path) -> None:
    """The message of vLLM 0.32's front-end, and what its core wrote before."""
    file = tmp_path / "engine.log"
    file.touch()

    def start() -> None:
        file.write_text(log)
        raise RuntimeError(HIDDEN)

    with pytest.raises(BackendError) as caught:
        Supervisor(LONG_S, file).call("start", start)
    assert cause in caught.value.message.splitlines()[0]
    assert "root cause above" not in caught.value.message.splitlines()[0]
