"""An engine's processes seen from the driver: a time limit for every call, the cause of a death, and an end to all."""

from __future__ import annotations

import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, Final, TypeVar

import psutil

from vime_core.errors import BackendError, VimeError
from vime_core.plugins.foreign import out_of_gpu_memory

_T = TypeVar("_T")
_POLL_S: Final = 0.1
_GRACE_S: Final = 3.0
_GONE_S: Final = 60.0
"""Longest wait for killed processes to be gone: the kernel takes back their memory first."""
_LOG_LINES: Final = 15
_HIDES_CAUSE: Final = "Engine core initialization failed"
_ERROR_LINE: Final = re.compile(r"(?:^|\s)((?:\w+\.)*\w*(?:Error|Exception): .+)")


class Supervisor:
    """Runs calls that may never return, in another thread, and gives up on them.

    Args:
        timeout_s: longest wait for one call.
        log: file that the engine's processes write to.
    """

    def __init__(self, timeout_s: float, log: Path) -> None:
        _start_resource_tracker()
        self._others = set(psutil.Process().children(recursive=True))  # what ran before the engine
        self._processes: set[psutil.Process] = set()
        self._cores: list[Any] = []
        self._timeout_s = timeout_s
        self._log = log
        self._written_before = 0

    @property
    def pids(self) -> list[int]:
        """Ids of the engine's processes."""
        return sorted(process.pid for process in self._processes)

    def adopt(self, cores: list[Any]) -> None:
        """Remember the processes that were started since the beginning; ``cores`` are direct children."""
        self._cores = cores
        self._processes = self._family()

    def call(self, what: str, function: Callable[[], _T]) -> _T:
        """The function's result.

        Raises:
            BackendError: it raised, a process of the engine died, or the time is up. The engine is then killed.
        """
        self._written_before = self._written()
        outcome = _in_thread(function)
        deadline = time.monotonic() + self._timeout_s
        while not outcome.done():
            wait([outcome], timeout=_POLL_S)
            if not outcome.done() and self._dead():
                wait([outcome], timeout=_GRACE_S)
                break
            if time.monotonic() > deadline:
                break
        return self._result(what, outcome)

    def _result(self, what: str, outcome: Future[_T]) -> _T:
        if self._dead():
            raise self.failure(f"the vLLM engine died during {what}: {self._causes()}", "VIME-BACKEND-061")
        if not outcome.done():
            raise self.failure(
                f"the vLLM engine did not answer {what} within rollout.timeout_s = {self._timeout_s:g} s"
                f" (its processes: {self._states()})",
                "VIME-BACKEND-062",
            )
        error = outcome.exception()
        if error is None or isinstance(error, VimeError):
            return outcome.result()
        raise self.failure(f"the vLLM engine failed in {what}: {self._cause_of(error)}", "VIME-BACKEND-060") from error

    def _cause_of(self, error: BaseException) -> str:
        """Why: vLLM's front-end only says that its core failed, and points to what the core wrote."""
        if _HIDES_CAUSE not in str(error):
            return str(error)
        told = [line for line in self._lines() if _HIDES_CAUSE not in line]
        causes = [match[1] for line in told if (match := _ERROR_LINE.search(line))]
        if causes:
            return causes[-1]
        codes = [int(code) for code in re.findall(r"'\w+': (-?\d+)", str(error))]
        return "; ".join(f"its core {_ended(code)}" for code in codes) or str(error)

    def failure(self, message: str, code: str) -> BackendError:
        """End the engine, and the error that says why, with the last lines that it wrote since the call began."""
        tail = self._last_lines()
        self.kill()
        said = f"{message}\n{tail}" if tail else message
        helps = "a larger rollout.timeout_s helps an engine that is only slow."
        if (memory := out_of_gpu_memory(said, "the engine")) is not None:
            helps = f"it ran out of GPU memory: {memory.remedy}"
        return BackendError(said, remedy=f"Read the engine's log, {self._log}; {helps}", code=code)

    def end(self, shutdown: Callable[[], None], timeout_s: float) -> None:
        """Ask the engine to end, wait for it, and kill what is left."""
        wait([_in_thread(shutdown)], timeout=timeout_s + _GRACE_S)
        self.kill()

    def kill(self) -> None:
        """End every process of the engine; returns when they are gone."""
        doomed = self._family()
        for process in doomed:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        for core in self._cores:
            core.join(timeout=_GONE_S)
        # Not psutil's own waiting: it would take the exit codes of direct children away from multiprocessing.
        deadline = time.monotonic() + _GONE_S
        while time.monotonic() < deadline and not all(map(_is_gone, doomed)):
            time.sleep(_POLL_S)

    def alive(self) -> list[int]:
        """Ids of the engine's processes that still run."""
        return sorted(process.pid for process in self._processes if not _is_gone(process))

    def _family(self) -> set[psutil.Process]:
        """The engine's processes with their children; before they were adopted, whatever is new below this one."""
        if not self._processes:
            return set(psutil.Process().children(recursive=True)) - self._others
        return self._processes | {child for process in self._processes for child in _children(process)}

    def _dead(self) -> list[psutil.Process]:
        return [process for process in self._processes if _is_gone(process)]

    def _causes(self) -> str:
        cores = {core.pid: core for core in self._cores}
        # The core first: its workers end with it.
        dead = sorted((process.pid for process in self._dead()), key=lambda pid: (pid not in cores, pid))
        return "; ".join(_cause(pid, _exit_code(cores[pid]) if pid in cores else None) for pid in dead)

    def _states(self) -> str:
        return ", ".join(f"{process.pid} {_state(process)}" for process in self._processes) or "none started"

    def _last_lines(self) -> str:
        return "\n".join(f"  | {line}" for line in self._lines()[-_LOG_LINES:])

    def _lines(self) -> list[str]:
        """What the engine wrote since the call began."""
        if not self._log.is_file():
            return []
        written = self._log.read_bytes()[self._written_before :].decode(errors="replace")
        return [line for line in written.splitlines() if line.strip()]

    def _written(self) -> int:
        return self._log.stat().st_size if self._log.is_file() else 0


def _start_resource_tracker() -> None:
    """Start it now, so that it is not taken for a process of the engine, which would otherwise start it.

    What a killed engine leaves it removes, and warns of it, which nobody can act on.
    """
    quiet = "ignore:resource_tracker"
    sys.warnoptions.append(quiet)
    try:
        resource_tracker.ensure_running()
    finally:
        sys.warnoptions.remove(quiet)


def _in_thread(function: Callable[[], _T]) -> Future[_T]:
    """A daemon thread of its own, because one that waits forever must not keep the interpreter from ending."""
    outcome: Future[_T] = Future()

    def run() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="vime-engine-call", daemon=True).start()
    return outcome


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _is_gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _state(process: psutil.Process) -> str:
    try:
        return str(process.status())
    except psutil.NoSuchProcess:
        return "gone"


def _exit_code(core: Any) -> int | None:
    """A dead core's. It is known once the last of its threads has ended, and vLLM's monitor may collect it first."""
    deadline = time.monotonic() + _GRACE_S
    while core.exitcode is None and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return core.exitcode


def _cause(pid: int, exit_code: int | None) -> str:
    if exit_code is None:
        return f"process {pid} is gone (a worker; the kernel's log says whether memory ran out)"
    return f"process {pid} {_ended(exit_code)}"


def _ended(exit_code: int) -> str:
    if exit_code < 0:
        return f"was ended by {signal.Signals(-exit_code).name}"
    return f"exited with code {exit_code}"
