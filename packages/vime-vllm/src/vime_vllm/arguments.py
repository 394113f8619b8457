"""vLLM's engine arguments from a run's configuration, policy and options."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any, Final

from vime_core.backends import RolloutContext
from vime_core.config.frozen import thaw
from vime_core.determinism.policy import DeterminismPolicy
from vime_core.errors import ConfigError, PolicyError
from vime_vllm.aligned.arguments import aligned_arguments, captures, refuse
from vime_vllm.engine_plugin import TRANSFER_BACKEND
from vime_vllm.options import VllmOptions

CPU_KV_CACHE_GIB: Final = 2.0
CPU_BATCHED_TOKENS: Final = 2048
EXTENSION: Final = "vime_vllm.engine_side.extension.VimeWorkerExtension"
CPU_WORKER: Final = "vime_vllm.engine_side.cpu_worker.PlainLinearWorker"
KNOWN_FLAGS: Final = frozenset({"paused_admission", "seed_per_request", "async_scheduling"})

_UNUSED_SHARE: Final = 0.01
"""Where the cache's size is given, vLLM uses the share for nothing but to refuse a GPU that others use too."""

_DTYPES: Final = {"bf16": "bfloat16", "fp32": "float32"}
_DECODE_GRAPHS: Final = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}


def policy_flags(policy: DeterminismPolicy) -> dict[str, bool]:
    """The policy's switches for the engine.

    Raises:
        PolicyError: a switch that this backend does not know, or one that it cannot turn off.
    """
    flags = dict(policy.rollout.flags)
    if unknown := sorted(set(flags) - KNOWN_FLAGS):
        raise PolicyError(
            f"policy {policy.id} asks the rollout for {unknown[0]!r}, which the vllm backend does not have",
            remedy=f"Choose another run.policy; this backend knows {', '.join(sorted(KNOWN_FLAGS))}.",
            code="VIME-ENV-064",
        )
    if not flags.get("seed_per_request", True):
        raise PolicyError(
            f"policy {policy.id} sets 'seed_per_request' to false, but every request of this backend has its own seed",
            remedy="Leave the flag out of the policy, or set it to true.",
            code="VIME-ENV-065",
        )
    return flags


def uses_compiler(options: VllmOptions, *, cpu: bool) -> bool:
    """Whether anything in the engine may be compiled: not when it runs eagerly."""
    return not (cpu if options.enforce_eager is None else options.enforce_eager)


def engine_arguments(
    context: RolloutContext, options: VllmOptions, flags: dict[str, bool], *, cpu: bool, known: set[str]
) -> dict[str, Any]:
    """Keyword arguments of ``vllm.LLM``; ``known`` are the names of the installed EngineArgs.

    Raises:
        ConfigError: ``engine_args`` holds an unknown name or one that contradicts what vime needs.
        PolicyError: it contradicts the policy.
    """
    _check_names(options, known)
    if captures(context.alignment, cpu=cpu):
        # Under a contract no bit depends on the step in which a token is computed, so vLLM may schedule ahead.
        flags = {name: value for name, value in flags.items() if name != "async_scheduling"}
    arguments = {**_common(context, options), **_optional(options, flags), **thaw(options.engine_args)}
    if cpu:
        arguments |= _cpu(context, options)
    elif uses_compiler(options, cpu=cpu):
        arguments.setdefault("compilation_config", dict(_DECODE_GRAPHS))
    _check_policy(options, flags, context.policy)
    if context.alignment is not None:
        refuse(context, options, cpu=cpu)
        return aligned_arguments(arguments, context.alignment, cpu=cpu)
    return arguments


def _common(context: RolloutContext, options: VllmOptions) -> dict[str, Any]:
    config = context.config
    return {
        "model": str(context.model_directory),
        "dtype": _DTYPES[config.trainer.dtype],
        "seed": config.run.seed % 2**32,
        "max_model_len": config.rollout.context_length,
        "max_num_seqs": options.max_num_seqs,
        "gpu_memory_utilization": _UNUSED_SHARE if options.kv_cache_gib else options.gpu_memory_utilization,
        "enable_prefix_caching": options.enable_prefix_caching,
        "tensor_parallel_size": options.tensor_parallel_size,
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": EXTENSION,
        "weight_transfer_config": {"backend": TRANSFER_BACKEND},
    }


def _optional(options: VllmOptions, flags: dict[str, bool]) -> dict[str, Any]:
    optional = {
        "enforce_eager": options.enforce_eager,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "attention_backend": options.attention_backend,
        "kv_cache_memory_bytes": options.kv_cache_gib and int(options.kv_cache_gib * 2**30),
        "async_scheduling": flags.get("async_scheduling"),
        # Within a Ray actor vLLM would make actors of its workers, which nobody here watches.
        "distributed_executor_backend": "mp" if options.tensor_parallel_size > 1 else None,
    }
    return {name: value for name, value in optional.items() if value is not None}


def _cpu(context: RolloutContext, options: VllmOptions) -> dict[str, Any]:
    """What the CPU needs: whole prompts (chunks and per-request seeds crash vLLM there) and visible weights."""
    if options.engine_args.get("enable_chunked_prefill"):
        raise ConfigError(
            "rollout.vllm.engine_args.enable_chunked_prefill = true: on a CPU vLLM crashes when a prompt with its own"
            " sampling seed is prefilled in chunks",
            remedy="Leave it out; vime turns it off on a CPU.",
            code="VIME-CONFIG-061",
        )
    if options.gpus:
        raise ConfigError(
            f"rollout.vllm.gpus = {list(options.gpus)}, but the installed vLLM computes on the CPU",
            remedy="Leave rollout.vllm.gpus out.",
            code="VIME-CONFIG-069",
        )
    length = context.config.rollout.context_length
    tokens = options.max_num_batched_tokens or max(CPU_BATCHED_TOKENS, length)
    if tokens < length:
        raise ConfigError(
            f"rollout.vllm.max_num_batched_tokens = {tokens} is less than rollout.context_length = {length}, and on a"
            " CPU a prompt must fit into one engine step",
            remedy="Raise rollout.vllm.max_num_batched_tokens, or leave it out.",
            code="VIME-CONFIG-062",
        )
    return {
        "enforce_eager": not uses_compiler(options, cpu=True),
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": tokens,
        "kv_cache_memory_bytes": int((options.kv_cache_gib or CPU_KV_CACHE_GIB) * 2**30),
        "worker_cls": CPU_WORKER,
    }


def _check_names(options: VllmOptions, known: set[str]) -> None:
    for name in options.engine_args:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            raise ConfigError(
                f"rollout.vllm.engine_args.{name}: the installed vLLM has no such engine argument",
                remedy=f"Did you mean {near[0]!r}?" if near else "See vLLM's documentation of EngineArgs.",
                code="VIME-CONFIG-060",
            )


def _check_policy(options: VllmOptions, flags: dict[str, bool], policy: DeterminismPolicy) -> None:
    for name in ("async_scheduling",):
        if name in flags and options.engine_args.get(name, flags[name]) != flags[name]:
            raise PolicyError(
                f"rollout.vllm.engine_args.{name} = {options.engine_args[name]!r} contradicts policy {policy.id},"
                f" which sets it to {flags[name]}",
                remedy=f"Leave {name} out of rollout.vllm.engine_args, or choose another run.policy.",
                code="VIME-ENV-066",
            )
