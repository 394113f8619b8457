"""A contract as one trainer holds it: chosen by the run, built into the model, read back from the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vime_core.alignment import KERNELS, Alignment
from vime_core.errors import PluginError, PolicyError
from vime_core.numerics import Operations
from vime_core.plugins.types import load_attribute
from vime_core.types import TrainSequence
from vime_megatron.aligned.side import ONE_RANK, ExpertLayout, MegatronSide, SpreadsExperts
from vime_megatron.structures.types import Blueprint

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from vime_megatron.aligned.model import AlignedModel
    from vime_megatron.model import PolicyModel

_NOTHING = np.zeros(2, np.float32)
PROBE = TrainSequence(key=(0, 0), tokens=(0, 0, 0), response_start=1, advantages=_NOTHING, weights=_NOTHING)


@dataclass(frozen=True)
class HeldContract:
    """The alignment of a run with this trainer's side of it and the operations that the side is built from."""

    alignment: Alignment
    side: MegatronSide
    operations: Operations

    def model(self, config: TransformerConfig, blueprint: Blueprint, context: int) -> AlignedModel:
        """The policy model, in the place of `vime_megatron.model.PolicyModel`."""
        from vime_megatron.aligned.model import AlignedModel
        from vime_megatron.aligned.refuse import refuse_config

        del context  # the rotary table is the model's, not the run's
        parts = self.side.parts(self.operations, blueprint)
        refuse_config(config, self.side.contract.id, parts.free_fields)
        parts.check(config)
        return AlignedModel(config, blueprint, self.operations, parts)

    def settings(self, model: PolicyModel) -> Mapping[str, Any]:
        """What the model's modules hold and which of them run, read back by a probe forward.

        Raises:
            ContractViolation: something computes outside the operations, or the modules hold several.
        """
        from vime_megatron.aligned.census import census, held_operations
        from vime_megatron.cpu_bridge import device
        from vime_megatron.packing import pack_microbatch

        operations = held_operations(model)
        batch = pack_microbatch([PROBE], device())
        modules = census(model, lambda: model(batch, 0.7))
        operations.kernels.settle_gradients(device())
        return {
            "contract": self.side.contract.id,
            "contract_digest": self.side.contract.digest,
            "provider": operations.provider,
            "provider_digest": operations.digest,
            "modules": modules,
            KERNELS: dict(operations.kernels.choices()),
            **getattr(model, "says", {}),
        }


def hold_contract(
    alignment: Alignment | None, spec: str, tensor_parallel: int, experts: ExpertLayout = ONE_RANK
) -> HeldContract | None:
    """Open this trainer's side of a contract; None without one.

    Args:
        alignment: of the run.
        spec: ``trainer.megatron.spec``.
        tensor_parallel: ``trainer.megatron.tensor_parallel``.
        experts: ``trainer.megatron.expert_parallel`` and ``expert_dispatcher``.

    Raises:
        PolicyError: ``spec`` contradicts the alignment, the contract refuses the layout, the side keeps another
            contract, or the provider cannot run here.
        PluginError: the side's target is absent or no `MegatronSide`.
    """
    side = require_layout(alignment, spec, tensor_parallel, experts)
    if alignment is None or side is None:
        return None
    return HeldContract(alignment, side, alignment.load_operations())


def require_layout(
    alignment: Alignment | None, spec: str, tensor_parallel: int, experts: ExpertLayout = ONE_RANK
) -> MegatronSide | None:
    """The side for a layout; PolicyError when ``spec`` contradicts the alignment or its contract refuses the layout."""
    _refuse_contradiction(alignment, spec)
    if alignment is None:
        return _without_contract(experts)
    from vime_megatron.aligned.refuse import refuse_tensor_parallel

    refuse_tensor_parallel(tensor_parallel, alignment.contract.id)
    side = _load_side(alignment.trainer_side)
    _require_same(side, alignment)
    if isinstance(side, SpreadsExperts):
        return side.over_ranks(experts)
    if experts != ONE_RANK:
        raise _no_experts(experts, f"contract {alignment.contract.id} has no experts for this structure")
    return side


def _without_contract(experts: ExpertLayout) -> None:
    if experts != ONE_RANK:
        raise _no_experts(experts, "without a contract this trainer knows no experts")


def _no_experts(experts: ExpertLayout, why: str) -> PolicyError:
    key = "expert_parallel" if experts.ranks > 1 else "expert_dispatcher"
    value = experts.ranks if experts.ranks > 1 else experts.dispatcher
    return PolicyError(
        f"trainer.megatron.{key} = {value!r}: {why}",
        remedy=f"Leave out trainer.megatron.{key}.",
        code="VIME-ALIGN-078",
    )


def _refuse_contradiction(alignment: Alignment | None, spec: str) -> None:
    if alignment is None and spec == "aligned":
        raise PolicyError(
            "trainer.megatron.spec = 'aligned' needs a contract, but alignment.contract is empty",
            remedy="Set alignment.contract, such as dense/v1, or trainer.megatron.spec = 'auto'.",
            code="VIME-ALIGN-031",
        )
    whose = {"local": "Megatron's own modules", "te": "Transformer Engine's modules"}
    if alignment is not None and spec in whose:
        raise PolicyError(
            f"trainer.megatron.spec = {spec!r} contradicts alignment.contract = {alignment.contract.id!r}:"
            f" {whose[spec]} do not keep it",
            remedy="Set trainer.megatron.spec = 'auto', or clear alignment.contract.",
            code="VIME-ALIGN-030",
        )


def _load_side(target: str) -> MegatronSide:
    side = load_attribute(target, target)
    if not isinstance(side, MegatronSide):
        raise PluginError(
            f"{target} is registered as the trainer's side of a contract, but is no MegatronSide: {side!r}",
            remedy="Give it a contract and a method parts(operations, blueprint).",
            code="VIME-ALIGN-037",
        )
    return side


def _require_same(side: MegatronSide, alignment: Alignment) -> None:
    if side.contract != alignment.contract:
        raise PolicyError(
            f"the run's contract {alignment.contract.id} has digest {alignment.contract.digest[:16]}, but"
            f" {alignment.trainer_side} keeps {side.contract.id} with digest {side.contract.digest[:16]}",
            remedy="Install one version of the package that defines the contract on both sides.",
            code="VIME-ALIGN-035",
        )
