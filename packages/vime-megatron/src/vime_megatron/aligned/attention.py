"""Megatron's self-attention slots: projections and heads, and within, rotary embedding and causal attention."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from vime_core.numerics import AttentionSpec, Operations
from vime_megatron.aligned.sequences import AlignedSequences, LayerTaps


class AlignedSelfAttention(SelfAttention):
    """Megatron's self-attention as far as its parts go; how they lie in a projection and follow is written here.

    Megatron's own forward has places for caches, gates and other layouts; this one has none of them.
    """

    linear_qkv: Any  # Megatron's own types do not say that modules are called
    linear_proj: Any
    core_attention: Any
    q_layernorm: Any
    k_layernorm: Any

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride] (the rest of Megatron's arguments is unused)
        self, hidden_states: Tensor, attention_mask: None, packed_seq_params: AlignedSequences
    ) -> tuple[Tensor, None]:
        """[T, H] to ([T, H], no bias left to add)."""
        query, key, value = self._heads(self.linear_qkv(hidden_states)[0])
        if self.q_layernorm is not None:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        return self.linear_proj(self.core_attention(query, key, value, attention_mask, packed_seq_params))

    def _heads(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, heads, D] and twice [T, groups, D] of a projection, where a group's key and value follow its queries."""
        groups, dim = self.num_query_groups_per_partition, self.hidden_size_per_attention_head
        heads = self.num_attention_heads_per_partition
        query, key, value = projected.view(-1, groups, heads // groups + 2, dim).split([heads // groups, 1, 1], 2)
        return query.reshape(-1, heads, dim), key.squeeze(2), value.squeeze(2)


class AlignedAttention(torch.nn.Module):
    """Attention within each packed sequence; positions and rotary table come with the pack.

    Args:
        layer_number: Megatron's, from 1.
        operations: of the contract.
        spec: scale, window and soft cap of the scores.
    """

    def __init__(self, layer_number: int, *, operations: Operations, spec: AttentionSpec, **_: Any) -> None:
        super().__init__()
        self.layer = layer_number - 1
        self.operations = operations
        self.spec = spec

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,  # noqa: ARG002 (the slot's signature)
        packed_seq_params: AlignedSequences,
        **unused: Any,  # noqa: ARG002 (the slot's signature)
    ) -> Tensor:
        """Query [T, heads, D], key and value [T, groups, D] to [T, heads x D]."""
        pack = packed_seq_params
        taps = LayerTaps(self.layer, pack.positions)
        taps("q", query)
        taps("k", key)
        taps("v", value)
        output = self.operations.rotary_attention(
            query, key, value, pack.positions, pack.rope_table, pack.cu_seqlens, self.spec, taps
        )
        taps("attention", output)
        return output.flatten(1)
