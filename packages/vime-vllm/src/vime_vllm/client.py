"""The driver's handle on one engine: started with its own environment, called under a time limit, ended for sure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar

from vime_core.determinism.environment import exactly
from vime_core.errors import BackendError, ContractViolation, Interrupted
from vime_vllm import compat
from vime_vllm.engine_log import EngineLog
from vime_vllm.supervision import Supervisor

_T = TypeVar("_T")
_SHUTDOWN_S: Final = 30.0


class EngineClient:
    """One engine. Every method raises BackendError when the engine died, hangs or fails; it is dead after that.

    Args:
        arguments: keyword arguments of ``vllm.LLM``.
        environment: variables that the engine's processes start with, beyond the inherited ones.
        removed: variables that they must not inherit.
        timeout_s: longest wait for one call.
        log: where the engine's processes and vLLM's front-end in this process write.
    """

    def __init__(
        self,
        arguments: Mapping[str, Any],
        environment: Mapping[str, str],
        removed: Iterable[str],
        timeout_s: float,
        log: EngineLog,
    ) -> None:
        self._log = log
        self._supervisor = Supervisor(timeout_s, log.path)
        self._shutdown_s = min(timeout_s, _SHUTDOWN_S)
        self._llm: Any = None
        self._has_ended = False
        with exactly(environment, removed), log.taking_children():
            log.take_front_end()
            self._llm = self.call("start", lambda: compat.open_llm(arguments))
        self._supervisor.adopt(compat.core_processes(self._llm))
        self.call("start", lambda: self.llm.init_weight_transfer_engine({"init_info": {}}))

    @property
    def llm(self) -> Any:
        """vLLM's front-end; use it only inside a function given to `call`."""
        if self._llm is None:
            raise _ended()
        return self._llm

    @property
    def log(self) -> Path:
        """The engine's log; it goes when the engine is closed, and stays when it failed."""
        return self._log.path

    @property
    def pids(self) -> list[int]:
        """Ids of the engine's processes."""
        return self._supervisor.pids

    def call(self, what: str, function: Callable[[], _T]) -> _T:
        """The result of a function that talks to the engine; ``what`` names it in an error."""
        if self._has_ended:
            raise _ended()
        try:
            return self._supervisor.call(what, function)
        except Interrupted:
            self._abandon()
            self._log.remove()
            raise
        except BaseException:
            self._abandon()
            raise

    def on_workers(self, method: str, *args: Any) -> list[Any]:
        """The results of a worker method, by rank."""
        return self.call(method, lambda: self.llm.collective_rpc(method, args=args))

    def agreed(self, method: str, *args: Any) -> Any:
        """The one result on which all workers agree.

        Raises:
            ContractViolation: they do not.
        """
        results = self.on_workers(method, *args)
        if any(result != results[0] for result in results):
            raise ContractViolation(
                f"the engine's workers do not agree on {method}",
                remedy="Tensor parallel ranks hold different weights; report this with the engine's log.",
                code="VIME-ALIGN-063",
            )
        return results[0]

    def core_report(self) -> dict[str, Any]:
        """What is effective in the engine core's process."""
        return self.call("vime_report", lambda: compat.read_core_report(self.llm))

    def close(self) -> None:
        """Shut the engine down, then make sure. Idempotent."""
        if self._llm is not None:
            self._has_ended = True
            core, self._llm = self._llm.llm_engine.engine_core, None
            self._supervisor.end(lambda: core.shutdown(timeout=self._shutdown_s), self._shutdown_s)
            self._log.remove()

    def _abandon(self) -> None:
        """After a failure: nothing of the engine stays behind but its log."""
        self._has_ended = True
        self._supervisor.kill()
        llm, self._llm = self._llm, None
        if llm is not None:
            with suppress(Exception):
                compat.abandon(llm)
        self._log.release_front_end()


def _ended() -> BackendError:
    return BackendError(
        "the vLLM engine has ended",
        remedy="Start the run again from its last checkpoint.",
        code="VIME-BACKEND-066",
    )
