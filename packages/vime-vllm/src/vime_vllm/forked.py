"""Engines that start in two seconds instead of twenty, for tests that start many of them. CPU only.

Nearly all of an engine's start is the import of vLLM, once in the core's process and once in the worker's. Here both
are forked: the core from a server that has imported vLLM and nothing else (no torch operation has run in it, and no
trainer), the worker from its core, which is how vLLM starts workers where a platform does not say otherwise. What the
processes then do, and with which environment, is the same.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
from collections.abc import Generator
from contextlib import contextmanager
from multiprocessing import forkserver
from typing import Any, Final
from unittest.mock import patch

from vime_core.alignment import Alignment
from vime_core.config.schema import RunConfig
from vime_core.determinism.environment import exactly
from vime_core.determinism.policy import DeterminismPolicy
from vime_vllm.aligned.arguments import aligned_environment
from vime_vllm.engine_log import EngineLog
from vime_vllm.environment import engine_environment, removed_variables

PRELOADED: Final = (
    "vime_vllm.aligned.cpu_worker",
    "vime_vllm.aligned.model",
    "vime_vllm.engine_plugin",
    "vime_vllm.engine_side.extension",
    "vime_vllm.engine_side.transfer",
    "vllm.v1.engine.core",
    "vime_vllm.forked_worker",
)


@contextmanager
def forked_engines(config: RunConfig, policy: DeterminismPolicy, alignment: Alignment) -> Generator[None]:
    """Start aligned engines by forking within a block, all of them in one environment.

    Args:
        config: the runs' threads are its.
        policy: of the runs.
        alignment: of the runs; all engines have its model class.
    """
    environment = engine_environment(config, policy, compiler=False, owner=os.getpid())
    environment |= aligned_environment(alignment, cpu=True)
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    log, server = EngineLog(), _server()
    server._stop()  # one that runs for somebody else has another environment, and not these modules
    with exactly(environment, removed_variables(config, policy, environment)), log.taking_children():
        server.ensure_running()
    try:
        with patch.object(importlib.import_module("vllm.v1.engine.utils"), "get_mp_context", lambda: context):
            yield
    finally:
        server._stop()  # it would stay until this process ends, and keep its environment
        log.remove()


def _server() -> Any:
    return forkserver._forkserver  # pyright: ignore[reportAttributeAccessIssue, reportPrivateUsage]
