"""Megatron's self-attention slot: absorbed MLA over the keys that the indexer chose."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from vime_glm5.megatron.modules import BlockLinear, Linear, Weight
from vime_glm5.numerics import Glm5Operations
from vime_glm5.structure import Glm5Shape
from vime_megatron.aligned.modules import AlignedRmsNorm
from vime_megatron.aligned.sequences import AlignedSequences, LayerTaps


class Indexer(torch.nn.Module):
    """Chooses keys; frozen, and its inputs are detached, so nothing here has a gradient."""

    def __init__(self, config: TransformerConfig, *, operations: Glm5Operations, shape: Glm5Shape) -> None:
        super().__init__()
        heads, dim = shape.index_heads, shape.index_dim
        self.operations, self.shape = operations, shape
        self.linear_wq_b = BlockLinear(config, heads * dim, shape.q_lora, operations=operations, trained=False)
        self.linear_wk = Linear(config, dim, shape.hidden, operations=operations, trained=False)
        self.k_norm = Weight(config, dim, trained=False, bias=True)
        self.linear_weights_proj = Linear(config, heads, shape.hidden, operations=operations, trained=False)

    @torch.no_grad()
    def forward(self, x: Tensor, query_latent: Tensor, pack: AlignedSequences, taps: LayerTaps) -> Tensor:
        """int32 [T, k]: rows of the pack that each token attends to, of x [T, H] and query_latent [T, q_lora]."""
        ops, shape = self.operations, self.shape
        queries = self.linear_wq_b(query_latent).unflatten(-1, (shape.index_heads, shape.index_dim))
        bias: Any = self.k_norm.bias
        keys = ops.layer_norm(self.linear_wk(x), self.k_norm.weight, bias, shape.index_eps)
        queries = ops.rope(queries, pack.positions, pack.rope_table, True)
        keys = ops.rope(keys.unsqueeze(1), pack.positions, pack.rope_table, True).squeeze(1)
        taps("index_queries", queries)
        taps("index_keys", keys)
        q, weights = ops.index_queries(queries, self.linear_weights_proj(x))
        rows, parts = ops.pack_index_keys(keys), list[Tensor]()
        for a, b in bounds(pack):
            visible = pack.positions[a:b] + 1
            parts.append(ops.choose_keys(q[a:b], weights[a:b], rows[a:b], visible, shape.index_top_k))
        chosen = torch.cat(parts)
        taps("chosen_keys", chosen)
        return chosen


class SparseMla(torch.nn.Module):
    """Queries through a latent, keys as latents, attention over the chosen keys of the same sequence.

    Args:
        config: Megatron's own.
        layer_number: Megatron's, from 1.
        operations: of the contract.
        shape: of the model.
    """

    def __init__(
        self, config: TransformerConfig, layer_number: int, *, operations: Glm5Operations, shape: Glm5Shape, **_: Any
    ) -> None:
        super().__init__()
        self.operations, self.shape, self.layer = operations, shape, layer_number - 1
        heads, query, eps = shape.heads, shape.nope + shape.rotary, shape.eps
        self.linear_q_down_proj = self._linear(config, shape.q_lora, shape.hidden)
        self.q_layernorm = AlignedRmsNorm(config, shape.q_lora, eps, operations=operations)
        self.linear_q_up_proj = self._linear(config, heads * query, shape.q_lora)
        self.linear_kv_down_proj = self._linear(config, shape.key_dim, shape.hidden)
        self.kv_layernorm = AlignedRmsNorm(config, shape.kv_lora, eps, operations=operations)
        self.linear_kv_up_proj = Weight(config, heads * (shape.nope + shape.value), shape.kv_lora)
        self.linear_proj = self._linear(config, shape.hidden, heads * shape.value)
        chooses = self.layer in shape.indexed_layers
        self.indexer = Indexer(config, operations=operations, shape=shape) if chooses else None

    def _linear(self, config: TransformerConfig, n: int, k: int) -> BlockLinear:
        return BlockLinear(config, n, k, operations=self.operations)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, packed_seq_params: AlignedSequences, **_: Any
    ) -> tuple[Tensor, None]:
        """[T, H] to ([T, H], no bias left to add)."""
        del attention_mask  # every query sees the chosen keys of its own sequence up to itself
        pack, x, ops, shape = packed_seq_params, hidden_states, self.operations, self.shape
        taps = LayerTaps(self.layer, pack.positions)
        latent = self.q_layernorm(self.linear_q_down_proj(x))
        taps("query_latent", latent)
        absorbed = ops.absorbed_weights(self.linear_kv_up_proj.weight, shape.heads, shape.nope)
        q = self._queries(latent, absorbed.keys, pack)
        keys = self._keys(x, pack)
        taps("q", q)
        taps("k", keys)
        if self.indexer is not None:
            pack.shared[_name(self.layer)] = self.indexer(x.detach(), latent.detach(), pack, taps)
        chosen = in_pack(pack.shared[_name(shape.choosing_layer(self.layer))], pack)
        attended = ops.sparse_attention(q, keys, chosen, shape.scale, shape.kv_lora)
        taps("attention", attended)
        values = ops.head_linear(attended, absorbed.values)
        taps("values", values)
        return self.linear_proj(values.flatten(1)), None

    def _queries(self, latent: Tensor, weights: Tensor, pack: AlignedSequences) -> Tensor:
        """[T, heads, L + R]."""
        shape = self.shape
        q = self.linear_q_up_proj(latent).unflatten(-1, (shape.heads, shape.nope + shape.rotary))
        nope, rotary = q.split([shape.nope, shape.rotary], -1)
        rotated = self.operations.rope(rotary.contiguous(), pack.positions, pack.rope_table, True)
        return torch.cat([self.operations.head_linear(nope, weights), rotated], -1)

    def _keys(self, x: Tensor, pack: AlignedSequences) -> Tensor:
        """[T, L + R], as they come back from the cache."""
        latent, rotary = self.linear_kv_down_proj(x).split([self.shape.kv_lora, self.shape.rotary], -1)
        rotated = self.operations.rope(rotary.unsqueeze(1).contiguous(), pack.positions, pack.rope_table, True)
        return self.operations.cached_keys(self.kv_layernorm(latent.contiguous()), rotated.squeeze(1))


def bounds(pack: AlignedSequences) -> list[tuple[int, int]]:
    """First row and end of each sequence of a pack."""
    return list(pairwise(cast("list[int]", cast("Any", pack.cu_seqlens).tolist())))


def in_pack(chosen: Tensor, pack: AlignedSequences) -> Tensor:
    """Positions within each sequence as rows of the pack; -1 stays."""
    lengths = pack.cu_seqlens[1:] - pack.cu_seqlens[:-1]
    first = torch.repeat_interleave(pack.cu_seqlens[:-1], lengths).unsqueeze(1)
    return torch.where(chosen < 0, chosen, chosen + first.int())


def _name(layer: int) -> str:
    return f"chosen_keys.{layer}"
