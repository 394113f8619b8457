"""What is said of errors that other people's code raised."""

from __future__ import annotations

import pytest

from vime_core.plugins.foreign import out_of_gpu_memory

TORCH = (
    "CUDA out of memory. Tried to allocate 1.84 GiB. GPU 0 has a total capacity of 139.80 GiB of which 29.94 MiB is"
    " free. Process 784 has 4.57 GiB memory in use."
)
NCCL = "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nFailed to CUDA calloc async 24 bytes\nmore"


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        (f"{TORCH} Of the allocated memory 1.87 GiB is allocated by PyTorch", TORCH),
        (f"  | (EngineCore pid=7) torch.OutOfMemoryError: {TORCH}\n  | (EngineCore pid=7) more", TORCH),
        (NCCL, "Failed to CUDA calloc async 24 bytes"),
        ("AcceleratorError: CUDA error: out of memory\nCompile with", "CUDA error: out of memory"),
        ("[0] NCCL WARN Cuda failure 2 'out of memory'", "Cuda failure 2 'out of memory'"),
    ],
)
def test_memory_that_is_used_up_is_told_with_what_helps(said: str, kept: str) -> None:
    found = out_of_gpu_memory(said, "the run")
    assert found is not None
    assert found.message == f"the run ran out of GPU memory: {kept}"
    assert "trainer.token_budget" in str(found.remedy)
    assert "rollout.vllm.kv_cache_gib" in str(found.remedy)


@pytest.mark.parametrize(
    "said", ["", "RuntimeError: no connection", "the machine is out of memory", "see 'CUDA out of memory. What now?'"]
)
def test_other_errors_are_not_about_gpu_memory(said: str) -> None:
    assert out_of_gpu_memory(said, "the run") is None
