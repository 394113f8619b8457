"""What a trainer rank really runs with, read back in its own process."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from vime_core.determinism.environment import deciding_environment, read_back
from vime_core.types import ProcessReport

_memory: Any = torch.utils.deterministic
PACKAGES = ("torch", "megatron-core", "numpy", "safetensors", "transformer-engine")


def process_report(rank: int, variables: Mapping[str, str], settings: Mapping[str, Any]) -> ProcessReport:
    """Effective environment, settings, versions and hardware of this process.

    Args:
        rank: of this process among the trainer's.
        variables: the policy's environment; their names are read back, besides all that can decide bits.
        settings: what the trainer was built with.
    """
    return ProcessReport(
        role="trainer",
        rank=rank,
        pid=os.getpid(),
        environment={**read_back(sorted({*variables, "OMP_NUM_THREADS"})), **deciding_environment()},
        settings={**settings, **_torch_settings()},
        versions={"python": platform.python_version(), **_versions()},
        hardware=_hardware(),
    )


def _torch_settings() -> dict[str, Any]:
    return {
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "fill_uninitialized_memory": _memory.fill_uninitialized_memory,
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = ""
    return found


def _hardware() -> dict[str, Any]:
    cuda = torch.cuda.is_available()
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "cuda": (torch.version.cuda or "") if cuda else "",
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
