"""The entry point: what this package registers. Names only; nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from vime_core.plugins import AlignedSide, ModelSource, ModelStructure, TrainerBackend, hookimpl

if TYPE_CHECKING:
    from pathlib import Path

    from vime_core.alignment import Alignment
    from vime_core.config.schema import RunConfig
    from vime_core.determinism.policy import DeterminismPolicy
    from vime_core.findings import Finding


@hookimpl
def vime_trainers() -> Iterable[TrainerBackend]:
    """The Megatron-core trainer."""
    yield TrainerBackend(
        "megatron",
        "Megatron-core: GPTModel, distributed optimizer, torch_dist checkpoints; CPU and CUDA.",
        "vime_megatron.trainer:open_trainer",
        "vime_megatron.options:MegatronOptions",
    )


@hookimpl
def vime_check_run(
    config: RunConfig, policy: DeterminismPolicy, model_directory: Path, alignment: Alignment | None
) -> Iterable[Finding]:
    """A run with this trainer: its options, the policy's flags and the model's configuration."""
    if config.trainer.backend == "megatron":
        from vime_megatron.readiness import check_run

        check_run(config, policy, model_directory, alignment)
    return ()


@hookimpl
def vime_model_structures() -> Iterable[ModelStructure]:
    """The dense decoder structures."""
    dense = "vime_megatron.structures.dense"
    yield ModelStructure("qwen2", "Qwen2 and Qwen2.5, dense.", f"{dense}:QWEN2", backend="megatron")
    yield ModelStructure("qwen3", "Qwen3, dense, with QK norm.", f"{dense}:QWEN3", backend="megatron")
    yield ModelStructure("llama", "Llama 2 and 3, SmolLM2.", f"{dense}:LLAMA", backend="megatron")


@hookimpl
def vime_aligned_sides() -> Iterable[AlignedSide]:
    """How this trainer keeps the dense contract."""
    yield AlignedSide(
        "dense/v1 megatron",
        "Megatron modules from the operations of dense/v1; one rank to a tensor.",
        "vime_megatron.aligned.dense:DENSE",
        backend="megatron",
        contract="dense/v1",
        structures=("qwen2", "qwen3", "llama"),
    )


@hookimpl
def vime_model_sources() -> Iterable[ModelSource]:
    """Where a HF model directory can come from."""
    package = "vime_megatron.sources"
    yield ModelSource(
        "directory",
        "A HF model directory on this machine.",
        f"{package}.directory:open_directory",
        f"{package}.directory:DirectoryOptions",
    )
    yield ModelSource(
        "random-qwen2",
        "A tiny random Qwen2 with a byte-level tokenizer, made from a seed.",
        f"{package}.random_qwen2:make_random_qwen2",
        f"{package}.random_qwen2:RandomQwen2Options",
    )
    yield ModelSource(
        "gguf",
        "A GGUF file, or the one in an installed data package, converted once.",
        f"{package}.gguf:open_gguf",
        f"{package}.gguf:GgufOptions",
    )
