"""vLLM loads this in every one of its processes, vime's or not (entry point group ``vllm.general_plugins``).

In a process of anybody else's it only adds one name to a table. In a process of a vime engine it also sends the
output to the engine's log and adds a method to the engine core that reports what is effective there.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from contextlib import suppress

from vime_vllm.environment import LOG, OWNER

TRANSFER_BACKEND = "vime"


def register() -> None:
    """Make the weight transfer engine ``vime`` known to vLLM. Idempotent."""
    # A vLLM without this factory is too old for vime, and none of vime's business here.
    with suppress(ImportError):
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

        with suppress(ValueError):
            WeightTransferEngineFactory.register_engine(
                TRANSFER_BACKEND, "vime_vllm.engine_side.transfer", "VimeTransferEngine"
            )
    if is_engine_process():
        _join_engine()


def is_engine_process() -> bool:
    """Whether a vime driver started this process as part of its engine."""
    return os.environ.get(OWNER, str(os.getpid())) != str(os.getpid())


def _join_engine() -> None:
    log = os.open(os.environ[LOG], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    faulthandler.enable()
    # Only the engine core has this module at this point; a worker has no use for it.
    if core := sys.modules.get("vllm.v1.engine.core"):
        from vime_vllm.engine_side.report import core_report

        core.EngineCore.vime_report = core_report
