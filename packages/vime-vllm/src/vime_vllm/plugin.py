"""What vime-vllm registers. Runs at discovery, so it imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from vime_core.plugins import hookimpl
from vime_core.plugins.types import AlignedSide, KernelEntry, RolloutEngine

if TYPE_CHECKING:
    from pathlib import Path

    from vime_core.alignment import Alignment
    from vime_core.config.schema import RunConfig
    from vime_core.determinism.policy import DeterminismPolicy
    from vime_core.findings import Finding


@hookimpl
def vime_rollouts() -> Iterable[RolloutEngine]:
    """The rollout engine ``vllm``."""
    yield RolloutEngine(
        "vllm",
        "vLLM in its own processes, with weights checked tensor by tensor.",
        "vime_vllm.rollout:open_rollout",
        "vime_vllm.options:VllmOptions",
    )


@hookimpl
def vime_check_run(
    config: RunConfig, policy: DeterminismPolicy, model_directory: Path, alignment: Alignment | None
) -> Iterable[Finding]:
    """A run with this engine: its options, environment and temperatures."""
    if config.rollout.backend == "vllm":
        from vime_vllm.readiness import check_run

        check_run(config, policy, model_directory, alignment)
    return ()


@hookimpl
def vime_aligned_sides() -> Iterable[AlignedSide]:
    """The engine side of ``dense/v1``."""
    yield AlignedSide(
        "dense/v1 vllm",
        "Qwen2, Qwen3 and Llama in vLLM, built from the contract's operations.",
        "vime_vllm.aligned.model:AlignedDecoder",
        backend="vllm",
        contract="dense/v1",
        structures=("qwen2", "qwen3", "llama"),
    )


@hookimpl
def vime_kernels() -> Iterable[KernelEntry]:
    """What vLLM bundles for Hopper."""
    yield KernelEntry(
        "deepgemm",
        "DeepGEMM's bf16 linear, where its bits are the provider's.",
        "vime_vllm.kernels.deep_gemm:offer",
        provider="cuda",
        operation="linear",
    )
    yield KernelEntry(
        "fa3",
        "FlashAttention 3 with one split and fixed blocks of keys.",
        "vime_vllm.kernels.fa3:offer",
        provider="cuda",
        operation="attention",
    )
