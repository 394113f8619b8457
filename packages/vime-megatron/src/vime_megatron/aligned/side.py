"""What a contract's side is to this trainer: the extension point for contracts and structures of other packages.

A plugin registers ``AlignedSide(name, summary, "module:SIDE", backend="megatron", contract=..., structures=...)``,
where ``SIDE`` is a `MegatronSide`. Every module that it names holds the operations that it was given as its attribute
``operations`` and computes with nothing else; the census (`vime_megatron.aligned.census`) holds it to that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

from vime_core.numerics import Contract, Operations, RopeScaling
from vime_megatron.structures.types import Blueprint

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True)
class AlignedParts:
    """A model's parts, for one structure and one set of operations.

    Args:
        block: specifications of the decoder layers and the final norm.
        embedding: turns the embedding that GPTModel made into one that computes with the operations.
        output_layer: the same for the output layer; called with hidden states and ``weight=``, it gives (logits, _).
        rope: base and scaling of the rotary table that travels with each pack.
        free_fields: fields of Megatron's ``TransformerConfig`` that the parts read, besides those of a dense decoder,
            and that the structure may therefore set.
        check: raises PolicyError for a configuration that the parts cannot be built in, before any is.
        says: what a record should say of these parts, beside their modules: what is frozen, what is not done.
    """

    block: TransformerBlockSubmodules
    embedding: Callable[[Any], Any]
    output_layer: Callable[[Any], Any]
    rope: tuple[float, RopeScaling]
    free_fields: frozenset[str] = field(default_factory=frozenset[str])
    check: Callable[[TransformerConfig], None] = lambda _: None
    says: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class ExpertLayout:
    """How experts are spread over ranks.

    Args:
        ranks: that share the experts of a layer.
        dispatcher: what moves tokens between them, by a name that the side knows.
    """

    ranks: int = 1
    dispatcher: str = "collective"


ONE_RANK: Final = ExpertLayout()


@runtime_checkable
class MegatronSide(Protocol):
    """How this trainer keeps a contract."""

    @property
    def contract(self) -> Contract:
        """The contract whose definitions the parts follow."""
        ...

    def parts(self, operations: Operations, blueprint: Blueprint) -> AlignedParts:
        """Build the specifications.

        Raises:
            PolicyError: the contract does not define something that the blueprint asks for.
        """
        ...


@runtime_checkable
class SpreadsExperts(Protocol):
    """What a `MegatronSide` has besides when its experts may be spread over ranks."""

    def over_ranks(self, layout: ExpertLayout) -> MegatronSide:
        """The side that builds parts for this layout; process groups exist when parts are built, not yet here.

        Raises:
            PolicyError: the dispatcher is unknown, sums early, or cannot run here.
        """
        ...
