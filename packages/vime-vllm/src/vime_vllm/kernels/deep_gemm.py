"""DeepGEMM's bf16 products as vLLM bundles them: one chain over ascending K, on Hopper.

A kernel is chosen on the host by how many blocks of rows there are: up to 16, up to 32, then every further 64 rows.
`tokens` names all of them up to the most rows of one call; more rows are computed in parts, since no row depends on
another. Sizes are not compiled in, so that shapes share kernels.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from vime_core.numerics.offers import LinearCall, LinearOffer
from vime_core.numerics.operations import source_digest
from vime_vllm.kernels.compiling import compile_all

LIBRARY: Final = "vllm.third_party.deep_gemm"
CACHE_VARIABLE: Final = "DG_JIT_CACHE_DIR"
CAPABILITY: Final = (9, 0)
_MOST_ROWS: Final = 8192
_MOST_ELEMENTS: Final = 1 << 27  # of an operand or result of one call
_STEP: Final = 64
_PRODUCTS_A_US: Final = 6e8  # in bf16, as cuBLAS reached on an H200
_BYTES_A_US: Final = 4e6
_PAYS_US: Final = 30  # the provider's own kernel starts in 7 and takes up to 1.3 times as long
_SUMMED: Final = (1, 64, 512, 2048, 8192)  # numbers of tokens that a weight's gradient is tried with


@cache
def offer() -> LinearOffer | str:
    """The offer, or why DeepGEMM cannot run in this process."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != CAPABILITY:
        return "DeepGEMM's bf16 products were proven on GPUs of capability 9.0 only"
    if find_spec("vllm") is None or find_spec(LIBRARY) is None:
        return f"{LIBRARY} is not installed"
    if not compiler():
        return "DeepGEMM compiles with nvcc, which is neither in CUDA_HOME nor on PATH"
    os.environ.setdefault(CACHE_VARIABLE, str(Path.home() / ".cache" / "vime" / "deep_gemm"))
    try:
        library = import_module(LIBRARY)
    except (ImportError, AssertionError, OSError, RuntimeError) as error:
        return f"{LIBRARY} cannot be imported: {error}"
    version = f"{library.__version__} {source_digest(Path(__file__).parent.glob('*.py'))}"
    return LinearOffer("deepgemm", version, covers, tokens, compile_all, run, pays)


def compiler() -> str:
    """The nvcc that DeepGEMM will call; empty: there is none."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    beside = shutil.which("nvcc", path=str(Path(home) / "bin")) if home else None
    return beside or shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin") or ""


def covers(call: LinearCall) -> bool:
    """Where rows of every operand start at multiples of 16 bytes."""
    return call.n % 8 == 0 and call.k % 8 == 0


def tokens(call: LinearCall) -> tuple[int, ...]:
    """Numbers of tokens of which each chooses another block of rows, up to the most rows of one call."""
    if call.of == "weight gradient":  # blocks are of the weight: the same for every number of tokens
        return tuple(m for m in _SUMMED if m <= most_rows(call))
    return (16, 32, *range(_STEP, most_rows(call) + 1, _STEP))


def most_rows(call: LinearCall) -> int:
    """Of one call; a multiple of 64."""
    return max(_STEP, min(_MOST_ROWS, _MOST_ELEMENTS // max(call.n, call.k)) // _STEP * _STEP)


def pays(call: LinearCall, count: int) -> bool:
    """Whether a GPU is busy with it for longer than the host: DeepGEMM looks for its kernel for 50 us of each call."""
    products = 2 * count * call.n * call.k
    moved = 2 * (count * (call.n + call.k) + call.n * call.k)
    return max(products / _PRODUCTS_A_US, moved / _BYTES_A_US) >= _PAYS_US


def run(call: LinearCall, left: Tensor, right: Tensor) -> Tensor:
    """See `LinearOffer.run`."""
    count, wide = left.shape[0], torch.float32 if call.wide else torch.bfloat16
    rows = call.n if call.of == "weight gradient" else count
    y = torch.empty(rows, call.n if call.of == "forward" else call.k, dtype=wide, device=left.device)
    _multiply(call, left, right, y, count)
    return y


def _multiply(call: LinearCall, left: Tensor, right: Tensor, y: Tensor, count: int) -> None:
    library = _library()
    if call.of == "weight gradient":
        library.bf16_gemm_tn(left, right, y, compiled_dims="")
        return
    multiply = library.bf16_gemm_nt if call.of == "forward" else library.bf16_gemm_nn
    if count <= _STEP or count <= (most := most_rows(call)):
        multiply(left, right, y, compiled_dims="")
        return
    for start in range(0, count, most):
        multiply(left[start : start + most], right, y[start : start + most], compiled_dims="")


def stored(call: LinearCall, count: int) -> tuple[tuple[int, int, torch.dtype], ...]:
    """Rows, columns and dtype of left and right operand and result of ``count`` tokens."""
    x, dy, weight = (count, call.k), (count, call.n), (call.n, call.k)
    sizes = {"forward": (x, weight, dy), "input gradient": (dy, weight, x), "weight gradient": (dy, x, weight)}[call.of]
    dtypes = (torch.bfloat16, torch.bfloat16, torch.float32 if call.wide else torch.bfloat16)
    return tuple((*size, dtype) for size, dtype in zip(sizes, dtypes, strict=True))


@cache
def _library() -> Any:
    return import_module(LIBRARY)


def run_all(calls: Sequence[tuple[LinearCall, int]]) -> None:
    """Run each call once on zeros, which compiles its kernel, in `workspace_bytes` of GPU memory.

    Operands and result are one buffer: products of zeros leave it as it is.
    """
    zeros = torch.zeros(workspace_bytes(calls), dtype=torch.uint8, device="cuda")
    for call, count in calls:
        left, right, y = (
            zeros[: rows * columns * dtype.itemsize].view(dtype).view(rows, columns)
            for rows, columns, dtype in stored(call, count)
        )
        _multiply(call, left, right, y, left.shape[0])
    torch.cuda.synchronize()


def workspace_bytes(calls: Sequence[tuple[LinearCall, int]]) -> int:
    """The largest operand or result of these calls."""
    return max(rows * columns * dtype.itemsize for task in calls for rows, columns, dtype in stored(*task))
