"""The Triton kernels: their source in the interpreter (fp32), compiled for Hopper, and on a GPU where there is one."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from vime_core.errors import PolicyError
from vime_core.numerics import load_provider

triton = pytest.importorskip("triton", reason="Triton is not installed: nothing of the provider 'cuda' can be tried")
CASES = Path(__file__).with_name("cuda_cases.py")
on_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: the compiled kernels are not run here"
)
interpretable = pytest.mark.skipif(
    tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7),
    reason="before Triton 3.7 the interpreter fails in loops with numpy 2.5",
)
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


def cases() -> Any:
    spec = importlib.util.spec_from_file_location("cuda_cases", CASES)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def interpreted() -> dict[str, float]:
    """fp32 only: the interpreter multiplies the bit patterns of bf16."""
    settings = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(CASES), "float32"]
    done = subprocess.run(command, capture_output=True, text=True, env=settings, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def judged(found: dict[str, float], dtype: torch.dtype) -> None:
    assert len(found) == 88
    assert sum(name.startswith("control") for name in found) == 7
    limits = {name: TOLERANCE[dtype] if name[-1].isdigit() else 0.0 for name in found}
    assert {name: value for name, value in found.items() if not value <= limits[name]} == {}


@interpretable
def test_interpreted_kernels_compute_their_definitions() -> None:
    judged(interpreted(), torch.float32)


def test_kernels_compile_for_hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every launch of the cases in bf16, with the types and constants it has; what they compute is not looked at."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import mangle_type

    from vime_core.numerics.cuda.launch import Remembered

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    sizes: dict[str, int] = {}
    fused: set[str] = set()

    def compiled(launched: Remembered, _grid: object, /, *args: Any, **options: Any) -> None:
        kernel: Any = launched.function
        names = [parameter.name for parameter in kernel.params]
        given = dict(zip(names, args, strict=False)) | {n: options.pop(n) for n in list(options) if n in names}
        values = {name: given[name] for name in names}
        fixed = {p.name for p in kernel.params if p.is_constexpr or values[p.name] is None}
        types = {name: "constexpr" if name in fixed else mangle_type(value) for name, value in values.items()}
        constants = {(i,): value for i, (name, value) in enumerate(values.items()) if name in fixed}
        key = f"{kernel.__name__} {types} {constants}"
        if key not in sizes:
            source = ASTSource(kernel, types, constants)
            asm = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm
            sizes[key] = len(asm["cubin"])
            fused.update({kernel.__name__} if "fma.rn.f32" in asm["ptx"] else ())

    monkeypatch.setattr(Remembered, "_launch", compiled)
    cases().run("cpu", torch.bfloat16)
    assert len({key.split()[0] for key in sizes}) == 21
    assert all(sizes.values())
    assert fused == {"attend", "query_gradient", "key_gradient"}, "a product's bits follow from how it was compiled"


@on_gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_compiled_kernels_compute_their_definitions(dtype: torch.dtype) -> None:
    judged(cases().run("cuda", dtype), dtype)


def test_a_machine_without_a_gpu_is_refused_with_what_it_can_use() -> None:
    if torch.cuda.is_available():
        assert load_provider("cuda").provider == "cuda"
        return
    with pytest.raises(PolicyError, match="this machine has no NVIDIA GPU") as caught:
        load_provider("cuda")
    assert '"cpu" or "reference"' in str(caught.value.remedy)
