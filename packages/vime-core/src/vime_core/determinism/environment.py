"""Environment variables by role: decided once, applied before heavy imports, read back afterwards."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Final

from vime_core.config.schema import RunConfig
from vime_core.determinism.policy import DeterminismPolicy
from vime_core.types import Role


def role_environment(config: RunConfig, policy: DeterminismPolicy, role: Role) -> dict[str, str]:
    """The variables that a process of this role needs: the policy's, and the configured CPU threads."""
    environment = dict(policy.role(role).environment)
    threads = {"trainer": config.trainer.threads, "rollout": config.rollout.threads, "driver": None}[role]
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    return environment


def apply(wanted: Mapping[str, str]) -> None:
    """Set the variables in this process; call before torch is imported."""
    os.environ.update(wanted)


@contextmanager
def exactly(wanted: Mapping[str, str], removed: Iterable[str] = ()) -> Generator[None]:
    """The environment that a child process is started with; this process's own is restored afterwards."""
    before = dict(os.environ)
    try:
        for name in removed:
            os.environ.pop(name, None)
        os.environ.update(wanted)
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


DECIDING_PREFIXES: Final = (
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "BLIS_", "ONEDNN_", "DNNL_", "NPY_", "NUMEXPR_"),
    *("TORCH", "PYTORCH_", "ATEN_", "TRITON_", "FLASHINFER_", "DG_", "NVTE_"),
    *("CUBLAS", "CUDA_", "CUDNN", "NCCL_", "VLLM_", "VIME_ENGINE_"),
)
DECIDING_NAMES: Final = frozenset(
    {"GLIBC_TUNABLES", "HF_HUB_OFFLINE", "LD_PRELOAD", "PYTHONHASHSEED", "TOKENIZERS_PARALLELISM"}
)
"""Variables that choose kernels, threads or orders of summation, and so decide bits."""

PER_RUN: Final = frozenset(
    {
        *("VIME_ENGINE_OWNER", "VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME", "VLLM_DIST_IDENT"),
        *("VLLM_RPC_BASE_PATH", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"),
    }
)
"""Process ids, random names and places of temporary files: different in every run, and they decide no number."""

_SECRET_SUFFIXES: Final = ("_KEY", "_TOKEN", "_SECRET", "_PASSWORD")


def deciding_environment() -> dict[str, str]:
    """This process's effective variables that can decide numbers or speed, by name; no secrets, nothing per run."""
    return {name: value for name, value in sorted(os.environ.items()) if decides(name)}


def decides(name: str) -> bool:
    """Whether a variable of this name can decide numbers."""
    if name in PER_RUN or name.endswith(_SECRET_SUFFIXES):
        return False
    return name in DECIDING_NAMES or name.startswith(DECIDING_PREFIXES)


def read_back(names: Iterable[str]) -> dict[str, str]:
    """The effective values of variables in this process; an unset one is the empty string."""
    return {name: os.environ.get(name, "") for name in names}
