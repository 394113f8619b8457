"""vLLM loads this in every one of its processes, vime's or not (entry point group ``vllm.general_plugins``).

In a process of anybody else's it only adds one name to a table. A process of a vime engine also ends with its driver,
and its core gets a method that reports what is effective there.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from importlib import import_module

from vime_vllm.aligned.registration import SIDE_VARIABLE, register_model_class
from vime_vllm.aligned.scheduling import limit_step_tokens
from vime_vllm.engine_side.orphan import end_with
from vime_vllm.environment import OWNER

TRANSFER_BACKEND = "vime"


def register() -> None:
    """Make the weight transfer engine ``vime`` known to vLLM. Idempotent."""
    # A vLLM without this factory is too old for vime, and none of vime's business here.
    with suppress(ImportError):
        factory = import_module("vllm.distributed.weight_transfer.factory").WeightTransferEngineFactory
        with suppress(ValueError):
            factory.register_engine(TRANSFER_BACKEND, "vime_vllm.engine_side.transfer", "VimeTransferEngine")
    if not is_engine_process():
        return
    end_with(int(os.environ[OWNER]))
    if side := os.environ.get(SIDE_VARIABLE):
        register_model_class(side)
    # Only an engine core has this module when vLLM loads its plugins.
    core = sys.modules.get("vllm.v1.engine.core")
    if core is not None:
        from vime_vllm.engine_side.report import core_report

        core.EngineCore.vime_report = core_report
        core.EngineCore.vime_limit_step_tokens = limit_step_tokens


def is_engine_process() -> bool:
    """Whether a vime driver started this process as part of its engine."""
    return os.environ.get(OWNER, str(os.getpid())) != str(os.getpid())
