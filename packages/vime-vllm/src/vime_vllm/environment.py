"""The environment that engine processes start with: the policy's variables and the engine's own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

from vime_core.config.schema import RunConfig
from vime_core.determinism.environment import role_environment
from vime_core.determinism.policy import DeterminismPolicy
from vime_core.errors import PolicyError

OWNER: Final = "VIME_ENGINE_OWNER"
"""Process id of the driver; a vLLM process that has it and is not the driver belongs to a vime engine."""

PLUGIN_NAME: Final = "vime"
"""Name of the entry point in ``vllm.general_plugins``, as ``VLLM_PLUGINS`` selects it."""

QUIET: Final = "WARNING"
"""``VLLM_LOGGING_LEVEL`` where the user has not set it."""

_ALWAYS: Final[Mapping[str, str]] = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONFAULTHANDLER": "1",
}
_REPORTED_PREFIXES: Final = (
    *("VLLM_", "VIME_ENGINE_", "OMP_", "MKL_", "KMP_", "GOMP_", "NCCL_", "CUBLAS", "CUDA_", "CUDNN"),
    *("TORCH", "PYTORCH_", "TRITON_", "FLASHINFER_", "DG_", "NVTE_"),
)
_REPORTED_NAMES: Final = frozenset(
    {"HF_HUB_OFFLINE", "LD_PRELOAD", "PYTHONHASHSEED", "TOKENIZERS_PARALLELISM", "NUMEXPR_MAX_THREADS"}
)
_PER_RUN: Final = frozenset({OWNER, "VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME"})
"""Process ids and random names: different in every run, and nothing that decides a number."""
_SECRET_SUFFIXES: Final = ("_KEY", "_TOKEN", "_SECRET", "_PASSWORD")


def engine_environment(config: RunConfig, policy: DeterminismPolicy, *, compiler: bool, owner: int) -> dict[str, str]:
    """Every variable that the engine's processes need, beyond what they inherit.

    Raises:
        PolicyError: the user set a variable of vLLM's to a value that contradicts it.
    """
    wanted = {**role_environment(config, policy, "rollout"), **_ALWAYS}
    if config.rollout.threads is not None:
        wanted["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    if not compiler:
        # vLLM compiles small helpers even where the model runs eagerly; on a CPU that costs 15 s in the first step.
        wanted["TORCHDYNAMO_DISABLE"] = "1"
    _refuse_contradictions(wanted)
    _refuse_hidden_settings()
    wanted["VLLM_LOGGING_LEVEL"] = os.environ.get("VLLM_LOGGING_LEVEL", QUIET)
    return {**wanted, OWNER: str(owner)}


def removed_variables(config: RunConfig, policy: DeterminismPolicy, wanted: Mapping[str, str]) -> set[str]:
    """What the trainer's role put into this process and the engine must not inherit."""
    trainer = role_environment(config, policy, "trainer")
    return set(trainer) - set(wanted)


def reported_environment() -> dict[str, str]:
    """This process's effective variables that can decide numbers or speed, without secrets."""
    return {name: value for name, value in sorted(os.environ.items()) if _is_reported(name)}


def _is_reported(name: str) -> bool:
    if name in _PER_RUN or name.endswith(_SECRET_SUFFIXES):
        return False
    return name in _REPORTED_NAMES or name.startswith(_REPORTED_PREFIXES)


def _refuse_contradictions(wanted: Mapping[str, str]) -> None:
    for name, value in wanted.items():
        found = os.environ.get(name)
        if name.startswith("VLLM_") and found not in (None, value):
            raise PolicyError(
                f"environment variable {name} = {found!r}, but vime starts the engine with {value!r}",
                remedy=f"Unset {name}; a variable that is set is never overwritten.",
                code="VIME-ENV-068",
            )


def _refuse_hidden_settings() -> None:
    if os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
        raise PolicyError(
            f"environment variable VLLM_CPU_KVCACHE_SPACE = {os.environ['VLLM_CPU_KVCACHE_SPACE']!r} would override"
            " rollout.vllm.kv_cache_gib",
            remedy="Unset it and set rollout.vllm.kv_cache_gib.",
            code="VIME-ENV-060",
        )
    chosen = os.environ.get("VLLM_PLUGINS")
    if chosen is not None and PLUGIN_NAME not in [name.strip() for name in chosen.split(",")]:
        raise PolicyError(
            f"environment variable VLLM_PLUGINS = {chosen!r} keeps vime's plugin out of the engine",
            remedy=f"Unset it, or add {PLUGIN_NAME!r} to it.",
            code="VIME-ENV-061",
        )
