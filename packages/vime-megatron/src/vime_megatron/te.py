"""Transformer Engine's modules in the layers of dense decoders: ``trainer.megatron.spec = "te"``.

Only linears, norms and core attention are its own; norms are not fused into linears, so that parameters have the names
of Megatron's local modules. Importing this module imports Transformer Engine.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingImports=false

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any, Final

import torch
from megatron.core.extensions import transformer_engine
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from vime_megatron.rope import rotate
from vime_megatron.specs import ModuleSet, PackedSequences

_engine: Any = transformer_engine


class EngineAttention(torch.nn.Module):
    """Megatron's core-attention slot: rotary embedding, then Transformer Engine's attention over the pack.

    Which kernel runs is its choice; ``NVTE_ALLOW_NONDETERMINISTIC_ALGO=0`` leaves it the deterministic ones.
    """

    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.inner = _engine.TEDotProductAttention(**given)

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
        pack = with_cumulative_lengths(packed_seq_params, query.device)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        output: Tensor = self.inner(
            query, key, value, None, attn_mask_type=AttnMaskType.padding_causal, packed_seq_params=pack
        )
        return output.reshape(output.shape[0], -1)


def with_cumulative_lengths(pack: PackedSequences, device: torch.device) -> PackedSequences:
    """The pack with what Transformer Engine reads of it: int32 [sequences + 1] from 0, and the longest length."""
    edges = torch.tensor([0, *accumulate(pack.lengths)], dtype=torch.int32, device=device)
    longest = max(pack.lengths)
    return replace(pack, cu_seqlens_q=edges, cu_seqlens_kv=edges, max_seqlen_q=longest, max_seqlen_kv=longest)


ENGINE: Final = ModuleSet(_engine.TEColumnParallelLinear, _engine.TERowParallelLinear, _engine.TENorm, EngineAttention)
