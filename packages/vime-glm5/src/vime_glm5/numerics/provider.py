"""The operations of a contract of GLM-5 by the name of a provider: what ``ContractEntry.operations`` names."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from vime_core.numerics import Contract, load_provider
from vime_core.numerics.operations import provider_digest, source_digest
from vime_glm5.numerics.contract import CACHE_KINDS
from vime_glm5.numerics.kernels import BY_PROVIDER, REFERENCE
from vime_glm5.numerics.operations import Glm5Operations


def load_operations(contract: Contract, provider: str) -> Glm5Operations:
    """The operations of ``glm5/v1`` or ``glm5/v1-bf16kv``.

    ``reference`` is plain torch; ``cpu`` runs the dense operations and attention in C++, with the same forward bits;
    ``cuda`` runs the dense operations in Triton and the rest in torch, with bits of its own.

    Raises:
        PolicyError: no provider of that name, or it cannot run on this machine.
    """
    return _load(contract.id, provider)


@cache
def _load(contract: str, provider: str) -> Glm5Operations:
    dense, kind = load_provider(provider), CACHE_KINDS[contract]
    own = {"dense": dense.digest, "cache": kind, "glm5": source_digest(Path(__file__).parent.glob("*.py"))}
    parameters = {**dense.parameters, **own}
    shared: dict[str, Any] = {"provider": dense.provider, "details": dense.details, "kernels": dense.kernels}
    return Glm5Operations(
        **shared,
        digest=provider_digest(parameters),
        parameters=MappingProxyType(parameters),
        glm=BY_PROVIDER.get(provider, REFERENCE),
        cache_kind=kind,
    )
