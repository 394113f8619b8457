"""Megatron's core-attention slot: rotary embedding, then causal attention, by the operations."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vime_core.numerics import AttentionSpec, Operations
from vime_megatron.aligned.sequences import AlignedSequences, LayerTaps


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
        query, key, value = _dense(query), _dense(key), _dense(value)
        taps("q", query)
        taps("k", key)
        taps("v", value)
        query = self.operations.rope(query, pack.positions, pack.rope_table)
        key = self.operations.rope(key, pack.positions, pack.rope_table)
        taps("q_rope", query)
        taps("k_rope", key)
        output, _ = self.operations.attention_packed(query, key, value, pack.cu_seqlens, self.spec)
        taps("attention", output)
        return output.flatten(1)


def _dense(x: Tensor) -> Tensor:
    """The same elements under the strides of a new tensor; a view of one token or head may have odd ones."""
    return x.contiguous().flatten().view(x.shape)
