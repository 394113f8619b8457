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
}
_RESPECTED: Final[Mapping[str, str]] = {"PYTHONFAULTHANDLER": "1", "VLLM_LOGGING_LEVEL": QUIET}
"""What vime sets only where the user has not: they decide no number."""
BATCH_INVARIANT: Final = "VLLM_BATCH_INVARIANT"
_VARIANT_ATTENTION: Final = "FLASHINFER"
_TRUE: Final = frozenset({"1", "true", "yes", "on"})


def engine_environment(config: RunConfig, policy: DeterminismPolicy, *, compiler: bool, owner: int) -> dict[str, str]:
    """Every variable that the engine's processes need, beyond what they inherit.

    Raises:
        PolicyError: the user set one of vime's own variables to a value that contradicts it. (The policy's are
            preflight's business: by now this process holds the trainer's.)
    """
    wanted = dict(_ALWAYS)
    if config.rollout.threads is not None:
        wanted["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    if not compiler:
        # vLLM compiles small helpers even where the model runs eagerly; on a CPU that costs 15 s in the first step.
        wanted["TORCHDYNAMO_DISABLE"] = "1"
    _refuse_contradictions(wanted)
    _refuse_hidden_settings()
    respected = {name: os.environ.get(name, value) for name, value in _RESPECTED.items()}
    environment = {**role_environment(config, policy, "rollout"), **wanted, **respected, OWNER: str(owner)}
    _refuse_variant_attention(config, environment)
    return environment


def removed_variables(config: RunConfig, policy: DeterminismPolicy, wanted: Mapping[str, str]) -> set[str]:
    """What the trainer's role put into this process and the engine must not inherit."""
    trainer = role_environment(config, policy, "trainer")
    return set(trainer) - set(wanted)


def _refuse_contradictions(wanted: Mapping[str, str]) -> None:
    for name, value in wanted.items():
        found = os.environ.get(name)
        if found not in (None, value) and not (value == "1" and str(found).lower() in _TRUE):
            raise PolicyError(
                f"environment variable {name} = {found!r}, but vime starts the engine with {value!r}",
                remedy=f"Unset {name}; a variable that is set is never overwritten.",
                code="VIME-ENV-068",
            )


def _refuse_variant_attention(config: RunConfig, environment: Mapping[str, str]) -> None:
    """What vLLM itself refuses after half a minute, with the reason, which it doesn't give."""
    asked: str | None = getattr(config.options("rollout", config.rollout.backend), "attention_backend", None)
    mode = environment.get(BATCH_INVARIANT, os.environ.get(BATCH_INVARIANT, "0"))
    if asked == _VARIANT_ATTENTION and mode != "0":
        raise PolicyError(
            f"rollout.vllm.attention_backend = {asked!r} with {BATCH_INVARIANT} = {mode!r}: vLLM's batch-invariant mode"
            " refuses it, since it cuts queries into tiles by their mean number in the batch, and its decode kernel has"
            " other bits than its prefill",
            remedy=f"Set FLASH_ATTN or TRITON_ATTN, or unset {BATCH_INVARIANT}; `vime verify batch` says what holds.",
            code="VIME-ENV-069",
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
