"""The trainer's side of ``glm5/v1`` and ``glm5/v1-bf16kv``: see `vime_megatron.aligned.side.MegatronSide`."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from megatron.core import parallel_state
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from vime_core.numerics import Contract, Operations
from vime_glm5.megatron.attention import SparseMla
from vime_glm5.megatron.modules import DenseMlp, require_bf16
from vime_glm5.megatron.moe import SparseMlp
from vime_glm5.megatron.structure import Glm5Blueprint
from vime_glm5.numerics import GLM5_V1, GLM5_V1_BF16KV, Glm5Operations
from vime_glm5.ranks.providers import open_ranks, require
from vime_glm5.ranks.types import Ranks
from vime_glm5.structure import Glm5Shape
from vime_megatron.aligned.dense import block_spec
from vime_megatron.aligned.layer import AlignedLayer
from vime_megatron.aligned.modules import (
    AlignedAddRmsNorm,
    AlignedColumnLinear,
    AlignedEmbedding,
    AlignedRmsNorm,
    adopt,
)
from vime_megatron.aligned.side import ONE_RANK, AlignedParts, ExpertLayout
from vime_megatron.structures.types import Blueprint

SAYS: Final = {"indexer": "frozen", "router_bias": "frozen", "routing_replay": "none"}


@dataclass(frozen=True)
class Glm5Side:
    """Alike layers but for their MLP, dense or sparse, and for who chooses keys."""

    contract: Contract
    experts: ExpertLayout = ONE_RANK

    def over_ranks(self, layout: ExpertLayout) -> Glm5Side:
        """See `vime_megatron.aligned.side.SpreadsExperts`."""
        require(layout.dispatcher, layout.ranks)
        return replace(self, experts=layout)

    def parts(self, operations: Operations, blueprint: Blueprint) -> AlignedParts:
        """See `MegatronSide.parts`."""
        assert isinstance(operations, Glm5Operations)
        assert isinstance(blueprint, Glm5Blueprint)
        shape = blueprint.shape
        ranks = self._ranks(shape)
        layers = [self._layer(operations, shape, layer, ranks) for layer in range(shape.layers)]
        return AlignedParts(
            block=block_spec(operations, layers),
            embedding=partial(adopt, kind=AlignedEmbedding, operations=operations),
            output_layer=partial(adopt, kind=AlignedColumnLinear, operations=operations),
            rope=blueprint.rope,
            check=partial(require_bf16, contract=self.contract.id),
            says=SAYS | {"experts": self._says_of_experts()},
        )

    def _ranks(self, shape: Glm5Shape) -> Ranks | None:
        """None where one rank holds all experts."""
        if self.experts.ranks == 1:
            return None
        group: Any = parallel_state.get_expert_model_parallel_group()
        return open_ranks(self.experts.dispatcher, group, shape.experts, shape.hidden)

    def _says_of_experts(self) -> str:
        ranks = self.experts.ranks
        return f"over {ranks} ranks by {self.experts.dispatcher}" if ranks > 1 else "on one rank"

    def _layer(self, operations: Glm5Operations, shape: Glm5Shape, layer: int, ranks: Ranks | None) -> ModuleSpec:
        dense = layer in shape.dense_layers
        slots: Any = TransformerLayerSubmodules
        return ModuleSpec(
            module=AlignedLayer,
            params={"operations": operations},
            submodules=slots(
                input_layernorm=partial(AlignedRmsNorm, operations=operations),
                self_attention=ModuleSpec(module=SparseMla, params={"operations": operations, "shape": shape}),
                pre_mlp_layernorm=partial(AlignedAddRmsNorm, operations=operations),
                mlp=partial(self._mlp, operations=operations, shape=shape, dense=dense, ranks=ranks),
            ),
        )

    def _mlp(
        self,
        config: TransformerConfig,
        *,
        operations: Glm5Operations,
        shape: Glm5Shape,
        dense: bool,
        ranks: Ranks | None,
        **_: Any,
    ) -> DenseMlp | SparseMlp:
        if dense:
            return DenseMlp(config, shape.intermediate, operations=operations)
        return SparseMlp(config, operations=operations, shape=shape, ranks=ranks)


FP8: Final = Glm5Side(GLM5_V1)
BF16: Final = Glm5Side(GLM5_V1_BF16KV)
