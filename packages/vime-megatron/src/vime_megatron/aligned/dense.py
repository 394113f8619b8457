"""The side of ``dense/v1``: Qwen2, Qwen3, Llama, and what structures close to them build theirs from."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from vime_core.numerics import DENSE_V1, AttentionSpec, Contract, Operations
from vime_megatron.aligned.attention import AlignedAttention, AlignedSelfAttention
from vime_megatron.aligned.layer import AlignedLayer, AlignedMlp
from vime_megatron.aligned.modules import (
    AlignedAddRmsNorm,
    AlignedColumnLinear,
    AlignedEmbedding,
    AlignedRmsNorm,
    AlignedRowLinear,
    adopt,
)
from vime_megatron.aligned.side import AlignedParts
from vime_megatron.specs import with_bias
from vime_megatron.structures.types import Blueprint


@dataclass(frozen=True)
class DenseSide:
    """See `vime_megatron.aligned.side.MegatronSide`."""

    contract: Contract = DENSE_V1

    def parts(self, operations: Operations, blueprint: Blueprint) -> AlignedParts:
        """Alike layers over all earlier keys."""
        qk_norm = bool(blueprint.transformer.get("qk_layernorm"))
        layer = layer_spec(
            operations,
            AttentionSpec(blueprint.head_dim**-0.5),
            qk_norm=qk_norm,
            output_bias=blueprint.output_bias,
            mlp_bias=blueprint.mlp_bias,
        )
        return AlignedParts(
            block=block_spec(operations, [layer] * int(blueprint.transformer["num_layers"])),
            embedding=partial(adopt, kind=AlignedEmbedding, operations=operations),
            output_layer=partial(adopt, kind=AlignedColumnLinear, operations=operations),
            rope=blueprint.rope,
        )


DENSE: Final = DenseSide()


def block_spec(operations: Operations, layers: list[ModuleSpec]) -> TransformerBlockSubmodules:
    """The layers, and an RMSNorm behind the last."""
    norm: Any = partial(AlignedRmsNorm, operations=operations)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


def layer_spec(
    operations: Operations,
    attention: AttentionSpec,
    *,
    qk_norm: bool,
    output_bias: bool = False,
    mlp_bias: bool = False,
) -> ModuleSpec:
    """One pre-normed layer: grouped-query attention and SwiGLU, with biases where they are asked for."""
    norm, add_norm = (partial(kind, operations=operations) for kind in (AlignedRmsNorm, AlignedAddRmsNorm))
    mlp = partial(AlignedMlp, operations=operations, bias=mlp_bias)
    slots: Any = TransformerLayerSubmodules
    return ModuleSpec(
        module=AlignedLayer,
        params={"operations": operations},
        submodules=slots(
            input_layernorm=norm,
            self_attention=attention_spec(operations, attention, qk_norm=qk_norm, output_bias=output_bias),
            pre_mlp_layernorm=add_norm,
            mlp=mlp,
        ),
    )


def attention_spec(
    operations: Operations, attention: AttentionSpec, *, qk_norm: bool, output_bias: bool = False
) -> ModuleSpec:
    """Megatron's self-attention around the operations."""
    norm = partial(AlignedRmsNorm, operations=operations) if qk_norm else IdentityOp
    slots: Any = SelfAttentionSubmodules
    return ModuleSpec(
        module=AlignedSelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=slots(
            linear_qkv=partial(AlignedColumnLinear, operations=operations),
            core_attention=partial(AlignedAttention, operations=operations, spec=attention),
            linear_proj=partial(with_bias, AlignedRowLinear, output_bias, operations=operations),
            q_layernorm=norm,
            k_layernorm=norm,
        ),
    )
