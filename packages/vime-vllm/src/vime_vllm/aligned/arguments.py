"""vLLM's arguments and environment under a contract, and what a contract refuses before an engine is started."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from vime_core.alignment import Alignment
from vime_core.backends import RolloutContext
from vime_core.errors import PolicyError
from vime_core.plugins.types import load_attribute
from vime_vllm import compat
from vime_vllm.aligned.installed import CONFIG_KEY, message
from vime_vllm.aligned.registration import SIDE_VARIABLE, architecture, register_model_class
from vime_vllm.options import VllmOptions

RUNNER_VARIABLE: Final = "VLLM_USE_V2_MODEL_RUNNER"
CPU_WORKER: Final = "vime_vllm.aligned.cpu_worker.AlignedCpuWorker"
GPU_WORKER: Final = "vime_vllm.aligned.gpu_worker.AlignedGpuWorker"

KEEPS_BITS: Final = frozenset(
    {
        *("async_scheduling", "block_size", "enable_chunked_prefill", "load_format", "long_prefill_token_threshold"),
        *("max_long_partial_prefills", "max_num_partial_prefills", "prefix_caching_hash_algo", "scheduling_policy"),
        *("tokenizer_mode", "trust_remote_code", "generation_config", "enable_log_requests", "swap_space"),
    }
)
"""Engine arguments that decide what is computed when and where, and no bit of it."""

CAPTURED_PROVIDERS: Final = frozenset({"cuda"})

_OFF: Final[tuple[object, ...]] = (None, False, "", {})


def refuse(context: RolloutContext, options: VllmOptions, *, cpu: bool) -> None:
    """Refuse by name what the contract of ``context`` cannot keep.

    Raises:
        PolicyError: an option, an engine argument or a sampling parameter of the configuration.
    """
    if (ranks := options.tensor_parallel_size) > 1:
        raise _refusal(f"tensor_parallel_size = {ranks}: the contract's engine holds whole weights", "VIME-ALIGN-020")
    if (name := options.attention_backend) is not None:
        reason = (
            "the contract attends by its own operation, which the trainer has too; no backend of vLLM's has its bits"
        )
        raise _refusal(f"attention_backend = {name!r}: {reason}", "VIME-ALIGN-024")
    if options.enforce_eager is False and not captures(context.alignment, cpu=cpu):
        raise _refusal("enforce_eager = False: this provider's operations are captured in no graph", "VIME-ALIGN-024")
    dtype = {"bf16": "bfloat16", "fp32": "float32"}[context.config.trainer.dtype]
    for name, value in options.engine_args.items():
        if not _keeps_bits(name, value, dtype, cpu=cpu):
            raise _argument_refusal(name, value)


def _keeps_bits(name: str, value: object, dtype: str, *, cpu: bool) -> bool:
    if name == "kv_cache_dtype":
        return value in ("auto", dtype)
    if name == "disable_cascade_attn":
        return value is True
    if name == "long_prefill_token_threshold" and cpu:
        return not value
    return name in KEEPS_BITS or value in _OFF


def _argument_refusal(name: str, value: object) -> PolicyError:
    if name == "quantization":
        return _refusal(
            f"engine_args.quantization = {value!r}: the engine computes from the weights that the trainer holds",
            "VIME-ALIGN-021",
        )
    if name == "enable_lora":
        return _refusal(
            f"engine_args.enable_lora = {value!r}: an adapter's products are no operation of the contract",
            "VIME-ALIGN-022",
        )
    if name == "kv_cache_dtype":
        return _refusal(
            f"engine_args.kv_cache_dtype = {value!r}: keys and values are kept in the model's dtype", "VIME-ALIGN-023"
        )
    if name == "long_prefill_token_threshold":
        return _refusal(
            f"engine_args.long_prefill_token_threshold = {value!r}: on a CPU vLLM crashes when a seeded prompt is"
            " prefilled in chunks",
            "VIME-ALIGN-027",
        )
    return _refusal(f"engine_args.{name} = {value!r}: it is not known to leave every bit as it is", "VIME-ALIGN-025")


def captures(alignment: Alignment | None, *, cpu: bool) -> bool:
    """Whether decode steps may be CUDA graphs: every operation of the provider launches without asking the host."""
    return not cpu and alignment is not None and alignment.provider in CAPTURED_PROVIDERS


def aligned_arguments(arguments: Mapping[str, Any], alignment: Alignment, *, cpu: bool) -> dict[str, Any]:
    """The engine arguments with the contract's model class, worker and message.

    Decode steps are captured in CUDA graphs where the provider allows it and nobody asked for eager ones.
    """
    eager = not captures(alignment, cpu=cpu) or bool(arguments.get("enforce_eager"))
    return {
        **{name: value for name, value in arguments.items() if not eager or name != "compilation_config"},
        "hf_overrides": {"architectures": [architecture(alignment.rollout_side)]},
        "additional_config": {CONFIG_KEY: message(alignment)},
        "worker_cls": CPU_WORKER if cpu else GPU_WORKER,
        "enforce_eager": eager,
        "max_logprobs": -1,  # where top-k or top-p cut, the ids of the tokens that they left are reported
    }


def aligned_environment(alignment: Alignment, *, cpu: bool) -> dict[str, str]:
    """Variables of the engine's processes: the class to register, and the model runner.

    V2 on a GPU where the class takes it; otherwise V1. A user's choice (``VLLM_USE_V2_MODEL_RUNNER``) goes before.

    Raises:
        PolicyError: V2 was chosen on a CPU whose Triton has no CPU, so that it does not run there.
    """
    takes_v2 = not cpu and getattr(side_class(alignment), "model_runner", "V1") == "V2"
    chosen = os.environ.get(RUNNER_VARIABLE, "1" if takes_v2 else "0")
    if cpu and chosen != "0" and not compat.triton_has_cpu():
        raise PolicyError(
            f"environment variable {RUNNER_VARIABLE} = {chosen!r}, but without a Triton for the CPU the contract needs"
            " model runner V1 there",
            remedy=f"Unset {RUNNER_VARIABLE}.",
            code="VIME-ALIGN-025",
        )
    return {SIDE_VARIABLE: alignment.rollout_side, RUNNER_VARIABLE: chosen}


def side_environment(alignment: Alignment) -> dict[str, str]:
    """Variables that the model class itself needs in the engine's processes (``engine_environment``)."""
    return dict(getattr(side_class(alignment), "engine_environment", {}))


def prepare(alignment: Alignment, model_directory: Path) -> None:
    """Refuse what class and provider cannot keep, while that costs no engine; then make the class known to vLLM.

    Raises:
        PluginError: the class cannot be imported.
        PolicyError: it does not cover the model's configuration, or the provider cannot run here.
    """
    alignment.load_operations()
    cls = side_class(alignment)
    check: Callable[[Any], None] | None = getattr(cls, "check_config", None)
    if check is not None:
        check(compat.model_configuration(model_directory))
    register_model_class(alignment.rollout_side, cls)


def side_class(alignment: Alignment) -> type[Any]:
    """The model class of the contract's engine side."""
    return load_attribute(alignment.rollout_side, alignment.contract.id)


def _refusal(what: str, code: str) -> PolicyError:
    return PolicyError(
        f"under an alignment contract: rollout.vllm.{what}",
        remedy="Leave it out, or set alignment.contract to empty.",
        code=code,
    )
