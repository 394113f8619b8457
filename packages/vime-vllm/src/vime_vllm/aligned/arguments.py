"""vLLM's arguments and environment under a contract, and what a contract refuses before an engine is started."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from vime_core.alignment import Alignment
from vime_core.backends import RolloutContext
from vime_core.errors import PolicyError
from vime_core.numerics import load_provider
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

_REFUSED: Final[Mapping[str, tuple[str, str]]] = {
    "quantization": ("VIME-ALIGN-021", "the contract computes from the weights that the trainer holds"),
    "enable_lora": ("VIME-ALIGN-022", "an adapter's products are no operation of the contract"),
    "kv_cache_dtype": ("VIME-ALIGN-023", "keys and values are kept in the model's dtype"),
}
_OFF: Final[tuple[object, ...]] = (None, False, "", {})


def refuse(context: RolloutContext, options: VllmOptions, *, cpu: bool) -> None:
    """Refuse by name what the contract of ``context`` cannot keep.

    Raises:
        PolicyError: an option, an engine argument or a sampling parameter of the configuration.
    """
    if options.tensor_parallel_size > 1:
        raise _refusal("tensor_parallel_size", options.tensor_parallel_size, "the engine holds whole weights", "020")
    if options.attention_backend is not None:
        raise _refusal("attention_backend", options.attention_backend, "the contract brings its own", "024")
    if options.enforce_eager is False:
        raise _refusal("enforce_eager", False, "its operations are captured in no graph", "024")
    dtype = {"bf16": "bfloat16", "fp32": "float32"}[context.config.trainer.dtype]
    for name, value in options.engine_args.items():
        _refuse_argument(name, value, dtype, cpu=cpu)
    _refuse_truncation(context)


def _refuse_argument(name: str, value: object, dtype: str, *, cpu: bool) -> None:
    if name == "kv_cache_dtype" and value in ("auto", dtype):
        return
    if name == "disable_cascade_attn" and value is True:
        return
    if name == "long_prefill_token_threshold" and cpu and value:
        raise _refusal(
            f"engine_args.{name}", value, "on a CPU vLLM crashes when a seeded prompt is prefilled in chunks", "027"
        )
    if name in KEEPS_BITS or (value in _OFF and name != "disable_cascade_attn"):
        return
    code, why = _REFUSED.get(name, ("VIME-ALIGN-025", "it is not known to leave every bit as it is"))
    raise _refusal(f"engine_args.{name}", value, why, code.removeprefix("VIME-ALIGN-"))


def _refuse_truncation(context: RolloutContext) -> None:
    sampling = context.config.sampling
    for name, off in (("top_p", 1.0), ("top_k", 0)):
        value: float = getattr(sampling, name)
        if value != off:
            raise PolicyError(
                f"sampling.{name} = {value!r} under an alignment contract: the tokens that were left to choose from are"
                " not recorded, so the trainer cannot score among them",
                remedy=f"Set sampling.{name} = {off}, or alignment.contract to empty.",
                code="VIME-ALIGN-028",
            )


def aligned_arguments(arguments: Mapping[str, Any], alignment: Alignment, *, cpu: bool) -> dict[str, Any]:
    """The engine arguments with the contract's model class, worker and message; eager, so that taps see all."""
    return {
        **{name: value for name, value in arguments.items() if name != "compilation_config"},
        "hf_overrides": {"architectures": [architecture(alignment.rollout_side)]},
        "additional_config": {CONFIG_KEY: message(alignment)},
        "worker_cls": CPU_WORKER if cpu else GPU_WORKER,
        "enforce_eager": True,
    }


def aligned_environment(alignment: Alignment, *, cpu: bool) -> dict[str, str]:
    """Variables of the engine's processes: the class to register, and model runner V1, which scores prompts too.

    On a GPU the user may choose V2 (``VLLM_USE_V2_MODEL_RUNNER=1``); its prompt log-probs are then refused.

    Raises:
        PolicyError: V2 was chosen on a CPU, where it does not exist.
    """
    chosen = os.environ.get(RUNNER_VARIABLE, "0")
    if cpu and chosen != "0":
        raise PolicyError(
            f"environment variable {RUNNER_VARIABLE} = {chosen!r}, but on a CPU the contract needs model runner V1",
            remedy=f"Unset {RUNNER_VARIABLE}.",
            code="VIME-ALIGN-025",
        )
    return {SIDE_VARIABLE: alignment.rollout_side, RUNNER_VARIABLE: chosen}


def prepare(alignment: Alignment, model_directory: Path) -> None:
    """Refuse what class and provider cannot keep, while that costs no engine; then make the class known to vLLM.

    Raises:
        PluginError: the class cannot be imported.
        PolicyError: it does not cover the model's configuration, or the provider cannot run here.
    """
    load_provider(alignment.provider)
    cls = side_class(alignment)
    check: Callable[[Any], None] | None = getattr(cls, "check_config", None)
    if check is not None:
        check(compat.model_configuration(model_directory))
    register_model_class(alignment.rollout_side, cls)


def side_class(alignment: Alignment) -> type[Any]:
    """The model class of the contract's engine side."""
    return load_attribute(alignment.rollout_side, alignment.contract.id)


def _refusal(name: str, value: object, why: str, number: str) -> PolicyError:
    return PolicyError(
        f"rollout.vllm.{name} = {value!r} under an alignment contract: {why}",
        remedy=f"Leave rollout.vllm.{name} out, or set alignment.contract to empty.",
        code=f"VIME-ALIGN-{number}",
    )
