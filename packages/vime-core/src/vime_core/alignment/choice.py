"""Which contract a run keeps, and what of each backend keeps it. Decided before anything is started."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vime_core.alignment.offers import Offered, choose_offered, open_offers
from vime_core.config.schema import RunConfig
from vime_core.errors import PolicyError
from vime_core.plugins.manager import PluginManager
from vime_core.plugins.types import AlignedSide, ContractEntry, load_attribute

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vime_core.numerics.contract import Contract
    from vime_core.numerics.operations import Operations


@dataclass(frozen=True)
class Alignment:
    """A contract with the provider of its operations and the two sides, as import targets (``"module:attribute"``).

    ``operations`` is the target that makes the operations, empty for those of ``dense/v1``; ``reference`` the one that
    makes the model which gradients are checked against, empty for transformers'. ``offered`` kernels may stand in
    for the provider's own.

    Plain data but for the contract itself, which has a canonical JSON form: it travels to the engine's processes.
    """

    contract: Contract
    provider: str
    trainer_side: str
    rollout_side: str
    operations: str = ""
    reference: str = ""
    offered: tuple[Offered, ...] = ()

    def load_operations(self) -> Operations:
        """The operations that this process computes with. Raises PolicyError: the provider cannot run here."""
        return load_operations(self.contract, self.provider, self.operations, self.offered)


def load_operations(contract: Contract, provider: str, target: str, offered: Sequence[Offered] = ()) -> Operations:
    """The operations of a contract by the name of their provider.

    Args:
        contract: whose operations.
        provider: ``alignment.provider``.
        target: ``ContractEntry.operations``; empty: the contract has the operations of ``dense/v1``.
        offered: kernels that may stand in for the provider's own; a target takes none.

    Raises:
        PolicyError: no provider of that name, or it or a required offer cannot run on this machine.
        PluginError: the target cannot be imported.
    """
    from vime_core.numerics.provider import load_provider

    if not target:
        return load_provider(provider, open_offers(offered))
    make: Callable[[Contract, str], Operations] = load_attribute(target, contract.id)
    return make(contract, provider)


def choose_alignment(config: RunConfig, plugins: PluginManager, model_type: str) -> Alignment | None:
    """The alignment that the configuration asks for; None when it asks for none.

    Raises:
        PluginError: the contract is not registered.
        PolicyError: a backend has no side for the contract and the model's structure, the provider does not exist or
            has no device here, or kernels are named that nothing offers.
    """
    from vime_core.numerics.provider import require_provider

    name = config.alignment.contract
    if not name:
        return None
    require_provider(config.alignment.provider)
    entry = plugins.find(ContractEntry, name, field_name="alignment.contract")
    offered = choose_offered(config.alignment, plugins)
    if entry.operations and any(each.required for each in offered):
        raise PolicyError(
            f"contract {name} has operations of its own, which take no offered kernels",
            remedy='Set alignment.linear = "own" and alignment.attention = "own".',
            code="VIME-ALIGN-013",
        )
    return Alignment(
        contract=entry.load(),
        provider=config.alignment.provider,
        trainer_side=_side(plugins, name, config.trainer.backend, model_type),
        rollout_side=_side(plugins, name, config.rollout.backend, model_type),
        operations=entry.operations,
        reference=entry.reference,
        offered=() if entry.operations else offered,
    )


def _side(plugins: PluginManager, contract: str, backend: str, model_type: str) -> str:
    of_backend = [s for s in plugins.of_kind(AlignedSide) if (s.backend, s.contract) == (backend, contract)]
    for side in of_backend:
        if model_type in side.structures:
            return side.target
    covered = sorted({structure for side in of_backend for structure in side.structures})
    raise PolicyError(
        f"alignment.contract = {contract!r}: backend {backend!r} does not keep it for model_type {model_type!r}."
        f" Covered there: {', '.join(covered) or 'none'}",
        remedy="Take another model or contract, or install a plugin that registers the side (vime_aligned_sides).",
        code="VIME-ALIGN-003",
    )
