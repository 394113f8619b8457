"""Lantern in the trainer: its blueprint for Megatron, and its side of ``lantern/v1``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from vime_core.numerics import AttentionSpec, Contract, Operations
from vime_lantern.contract import LANTERN_V1
from vime_megatron.aligned.side import AlignedParts
from vime_megatron.mapping import Rule, same
from vime_megatron.structures.dense import DenseStructure
from vime_megatron.structures.types import Blueprint

AFTER: Final = ("after_attention_norm", "after_mlp_norm")


@dataclass(frozen=True)
class LanternBlueprint(Blueprint):
    """A dense decoder's, with the keys of ``config.json`` that are Lantern's own."""

    window: int = 0
    score_cap: float = 0.0
    logit_cap: float = 0.0


class LanternStructure(DenseStructure):
    """Llama's weights and two norms more in each layer."""

    def blueprint(self, config: Mapping[str, Any]) -> LanternBlueprint:
        """See `vime_megatron.structures.types.Structure`."""
        own = {name: config[name] for name in ("window", "score_cap", "logit_cap")}
        return LanternBlueprint(**vars(super().blueprint(config)), **own)

    def _layer_rules(self, target: str, source: str, head_shape: tuple[int, int, int]) -> list[Rule]:
        after = [same(f"{target}{name}.weight", f"{source}{name}.weight") for name in AFTER]
        return [*super()._layer_rules(target, source, head_shape), *after]


class LanternSide:
    """See `vime_megatron.aligned.side.MegatronSide`. Megatron itself is imported when a model is built."""

    contract: Contract = LANTERN_V1

    def parts(self, operations: Operations, blueprint: Blueprint) -> AlignedParts:
        """Windows in even layers, the two norms more, and capped logits."""
        from vime_lantern.layer import LanternLayer, capped_output
        from vime_megatron.aligned.dense import block_spec, layer_spec
        from vime_megatron.aligned.modules import AlignedEmbedding, adopt

        assert isinstance(blueprint, LanternBlueprint)
        kinds = [attention_spec(blueprint, layer) for layer in range(blueprint.transformer["num_layers"])]
        layers = [replace(layer_spec(operations, kind, qk_norm=False), module=LanternLayer) for kind in kinds]
        return AlignedParts(
            block=block_spec(operations, layers),
            embedding=partial(adopt, kind=AlignedEmbedding, operations=operations),
            output_layer=partial(capped_output, operations=operations, cap=blueprint.logit_cap),
            rope=blueprint.rope,
        )


def attention_spec(blueprint: LanternBlueprint, layer: int) -> AttentionSpec:
    """What layer number ``layer`` (from 0) sees."""
    return AttentionSpec(blueprint.head_dim**-0.5, None if layer % 2 else blueprint.window, blueprint.score_cap)


LANTERN: Final = LanternStructure()
SIDE: Final = LanternSide()
