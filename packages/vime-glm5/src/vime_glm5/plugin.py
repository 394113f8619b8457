"""What vime-glm5 registers. Runs at discovery, so it imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from vime_core.plugins import AlignedSide, AlignmentCheck, ContractEntry, ModelSource, ModelStructure, hookimpl

if TYPE_CHECKING:
    from vime_core.config.schema import RunConfig
    from vime_core.findings import Finding

_STRUCTURES = ("glm_moe_dsa",)


@hookimpl
def vime_check_run(config: RunConfig, model_directory: Path) -> Iterable[Finding]:
    if config.alignment.contract.startswith("glm5/"):
        from vime_glm5.readiness import check_run

        check_run(config, model_directory)
    return ()


@hookimpl
def vime_model_structures() -> Iterable[ModelStructure]:
    yield ModelStructure(
        "glm_moe_dsa",
        "GLM-5: MLA, sparse attention with shared indices, mixture of experts.",
        "vime_glm5.megatron.structure:STRUCTURE",
        backend="megatron",
    )


@hookimpl
def vime_model_sources() -> Iterable[ModelSource]:
    yield ModelSource(
        "random-glm5",
        "A tiny random GLM-5 with a byte-level tokenizer, made from a seed.",
        "vime_glm5.source:make_random_glm5",
        "vime_glm5.source:RandomGlm5Options",
    )
    yield ModelSource(
        "glm5-checkpoint",
        "A GLM-5 checkpoint in block FP8 or bf16, as bf16 masters, whole or its first layers.",
        "vime_glm5.checkpoint:open_glm5_checkpoint",
        "vime_glm5.checkpoint:Glm5CheckpointOptions",
    )


@hookimpl
def vime_contracts() -> Iterable[ContractEntry]:
    operations = "vime_glm5.numerics.provider:load_operations"
    reference = "vime_glm5.reference:open_reference"
    yield ContractEntry(
        "glm5/v1",
        "GLM-5 in block FP8 with an FP8 KV cache.",
        "vime_glm5.numerics.contract:GLM5_V1",
        operations=operations,
        reference=reference,
    )
    yield ContractEntry(
        "glm5/v1-bf16kv",
        "GLM-5 in block FP8 with a bf16 KV cache.",
        "vime_glm5.numerics.contract:GLM5_V1_BF16KV",
        operations=operations,
        reference=reference,
    )


@hookimpl
def vime_alignment_checks() -> Iterable[AlignmentCheck]:
    yield AlignmentCheck(
        "routing",
        "Do engine and trainer choose the same experts and keys, layer by layer?",
        "vime_glm5.routing:run",
        contracts=("glm5/v1", "glm5/v1-bf16kv"),
    )


@hookimpl
def vime_aligned_sides() -> Iterable[AlignedSide]:
    for contract, side in (("glm5/v1", "FP8"), ("glm5/v1-bf16kv", "BF16")):
        yield AlignedSide(
            f"{contract} megatron",
            "GLM-5 in Megatron's layers, from the contract's operations; one rank.",
            f"vime_glm5.megatron.side:{side}",
            backend="megatron",
            contract=contract,
            structures=_STRUCTURES,
        )
        yield AlignedSide(
            f"{contract} vllm",
            "GLM-5 in vLLM with caches of its own, from the contract's operations.",
            "vime_glm5.vllm.model:AlignedGlm5",
            backend="vllm",
            contract=contract,
            structures=_STRUCTURES,
        )
