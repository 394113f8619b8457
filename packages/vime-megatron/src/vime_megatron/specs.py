"""Layer specifications of Megatron's own modules, with our packed attention as core attention."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from vime_megatron.attention import packed_attention
from vime_megatron.rope import rotate

Module = TypeVar("Module", bound=torch.nn.Module)


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's description of a pack, with the lengths on the host and each token's rotary angles.

    ``cos`` and ``sin`` are fp32 [T, 1, head_dim / 2]: looked up once a microbatch, not once a layer. ``starts`` is
    int32 [sequences + 1], the first token of each sequence, and T.
    """

    lengths: tuple[int, ...] = ()
    cos: Tensor | None = None
    sin: Tensor | None = None
    starts: Tensor | None = None


class PackedCausalAttention(torch.nn.Module):
    """Megatron's core-attention slot: rotary embedding, then causal attention within each packed sequence.

    Rotary embedding stands here because it follows the QK norm and needs positions within the sequences.
    """

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.scale: float = softmax_scale or float(config.kv_channels or 0) ** -0.5

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,  # noqa: ARG002 (the slot's signature)
        packed_seq_params: PackedSequences | None = None,
        **_: Any,
    ) -> Tensor:
        """Query [T, heads, D], key and value [T, groups, D] to [T, heads x D]."""
        assert packed_seq_params is not None
        cos, sin = packed_seq_params.cos, packed_seq_params.sin
        assert cos is not None
        assert sin is not None
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        pack = packed_seq_params
        return packed_attention(query, key, value, pack.lengths, self.scale, pack.starts).flatten(1)


def with_bias(kind: Callable[..., Module], wanted: bool, *sizes: int, **given: Any) -> Module:
    """A linear of class ``kind``, with a bias where it is ``wanted``, whatever Megatron's one switch for all says."""
    return kind(*sizes, **{**given, "bias": wanted})


@dataclass(frozen=True)
class ModuleSet:
    """The modules that dense layers are made of. Their parameters have the same names in every set."""

    column: Any
    row: Any
    norm: Any
    core_attention: Any


LOCAL: Final = ModuleSet(ColumnParallelLinear, RowParallelLinear, WrappedTorchNorm, PackedCausalAttention)
"""Megatron's local modules: unfused linears and torch's RMSNorm."""


def dense_block_spec(
    layers: int, *, qk_norm: bool, output_bias: bool = False, mlp_bias: bool = False, modules: ModuleSet = LOCAL
) -> TransformerBlockSubmodules:
    """Dense decoder layers of one set of modules."""
    head_norm: Any = modules.norm if qk_norm else IdentityOp
    bias_dropout_add: Any = get_bias_dropout_add
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=modules.column,
            core_attention=modules.core_attention,
            linear_proj=partial(with_bias, modules.row, output_bias),
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )
    mlp = partial(
        MLP.as_mlp_submodule,
        submodules=MLPSubmodules(
            linear_fc1=partial(with_bias, modules.column, mlp_bias),
            linear_fc2=partial(with_bias, modules.row, mlp_bias),
        ),
    )
    layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=modules.norm,
            self_attention=attention,
            self_attn_bda=bias_dropout_add,
            pre_mlp_layernorm=modules.norm,
            mlp=mlp,
            mlp_bda=bias_dropout_add,
        ),
    )
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=modules.norm)
