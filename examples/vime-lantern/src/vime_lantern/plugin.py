"""What this distribution registers. Runs at discovery, so it imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterable

from vime_core.plugins import hookimpl
from vime_core.plugins.types import AlignedSide, ContractEntry, ContractModel, ModelStructure

STRUCTURES = ("lantern",)


@hookimpl
def vime_model_structures() -> Iterable[ModelStructure]:
    summary = "Windows, post norms, soft caps."
    yield ModelStructure("lantern", summary, "vime_lantern.megatron:LANTERN", backend="megatron")


@hookimpl
def vime_contracts() -> Iterable[ContractEntry]:
    yield ContractEntry(
        "lantern/v1",
        "The operations of Lantern.",
        "vime_lantern.contract:LANTERN_V1",
        reference="vime_lantern.reference:open_reference",
    )


@hookimpl
def vime_aligned_sides() -> Iterable[AlignedSide]:
    for backend, target in (("megatron", "vime_lantern.megatron:SIDE"), ("vllm", "vime_lantern.vllm:AlignedLantern")):
        yield AlignedSide(
            f"lantern/v1 {backend}",
            f"Lantern in {backend}.",
            target,
            backend=backend,
            contract="lantern/v1",
            structures=STRUCTURES,
        )


@hookimpl
def vime_contract_models() -> Iterable[ContractModel]:
    yield ContractModel("lantern", "Small random Lanterns.", "vime_lantern.models:write", contract="lantern/v1")
