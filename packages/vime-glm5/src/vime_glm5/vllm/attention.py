"""Absorbed MLA over chosen keys in vLLM: caches of latents and index keys, read through the block table only."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vime_core.alignment.taps import layer_tap, tap
from vime_glm5.numerics import Glm5Operations
from vime_glm5.numerics.latent_codec import row_bytes
from vime_glm5.structure import Glm5Shape
from vime_glm5.vllm.cache import Request, RowCache, RowMetadata
from vime_glm5.vllm.modules import AbsorbedLinear, BlockLinear
from vime_vllm.aligned.modules import Linear, RmsNorm, Rope, weight


class LayerNorm(nn.Module):
    """LayerNorm with its weight and bias, in the contract's operation."""

    def __init__(self, operations: Glm5Operations, size: int, eps: float) -> None:
        super().__init__()
        self.operations, self.eps = operations, eps
        self.weight, self.bias = weight(size), weight(size)

    def forward(self, x: Tensor) -> Tensor:
        return self.operations.layer_norm(x, self.weight, self.bias, self.eps)


class Indexer(nn.Module):
    """Chooses keys of the same request, of all that are in the cache."""

    def __init__(self, operations: Glm5Operations, shape: Glm5Shape, vllm_config: Any, layer: int) -> None:
        super().__init__()
        self.operations, self.shape, self.layer = operations, shape, layer
        self.wq_b = BlockLinear(operations, shape.q_lora, shape.index_heads * shape.index_dim)
        self.wk = Linear(operations, shape.hidden, shape.index_dim)
        self.k_norm = LayerNorm(operations, shape.index_dim, shape.index_eps)
        self.weights_proj = Linear(operations, shape.hidden, shape.index_heads)
        self.cache = RowCache(vllm_config, f"model.layers.{layer}.self_attn.indexer.cache", shape.index_dim + 4)

    def forward(self, x: Tensor, query_latent: Tensor, positions: Tensor, rope: Rope) -> Tensor:
        """int32 (T, k): positions of the keys that each token attends to."""
        ops, shape = self.operations, self.shape
        queries = self.wq_b(query_latent).unflatten(-1, (shape.index_heads, shape.index_dim))
        keys = rope(self.k_norm(self.wk(x)).unsqueeze(1), positions).squeeze(1)
        queries = rope(queries, positions)
        tap(layer_tap(self.layer, "index_queries"), positions, queries)
        tap(layer_tap(self.layer, "index_keys"), positions, keys)
        q, weights = ops.index_queries(queries, self.weights_proj(x))
        chosen = torch.full((len(x), shape.index_top_k), -1, dtype=torch.int32, device=x.device)
        metadata = self.cache.metadata()
        if metadata is None:
            return chosen
        self.cache.write(ops.pack_index_keys(keys), metadata.slots)
        for request in metadata.requests():
            part = slice(request.first, request.end)
            rows = self.cache.read(request, torch.arange(request.length, device=x.device))
            visible = positions[part] + 1
            chosen[part] = ops.choose_keys(q[part], weights[part], rows, visible, shape.index_top_k)
        tap(layer_tap(self.layer, "chosen_keys"), positions[: metadata.tokens], chosen[: metadata.tokens])
        return chosen


class SparseMla(nn.Module):
    """The attention of one layer; names of modules are those of a Hugging Face directory."""

    def __init__(self, operations: Glm5Operations, shape: Glm5Shape, vllm_config: Any, layer: int) -> None:
        super().__init__()
        self.operations, self.shape, self.layer = operations, shape, layer
        heads, query = shape.heads, shape.nope + shape.rotary
        self.q_a_proj = BlockLinear(operations, shape.hidden, shape.q_lora)
        self.q_a_layernorm = RmsNorm(operations, shape.q_lora, shape.eps)
        self.q_b_proj = BlockLinear(operations, shape.q_lora, heads * query)
        self.kv_a_proj_with_mqa = BlockLinear(operations, shape.hidden, shape.key_dim)
        self.kv_a_layernorm = RmsNorm(operations, shape.kv_lora, shape.eps)
        self.kv_b_proj = AbsorbedLinear(operations, shape.kv_lora, heads, shape.nope, shape.value)
        self.o_proj = BlockLinear(operations, heads * shape.value, shape.hidden)
        chooses = layer in shape.indexed_layers
        self.indexer = Indexer(operations, shape, vllm_config, layer) if chooses else None
        width = row_bytes(operations.cache_kind, shape.kv_lora, shape.rotary)
        self.cache = RowCache(vllm_config, f"model.layers.{layer}.self_attn.cache", width)

    def forward(self, x: Tensor, positions: Tensor, rope: Rope, shared: dict[int, Tensor]) -> Tensor:
        """(T, H) of normed x (T, H); ``shared`` holds the chosen keys of the layers before."""
        latent = self.q_a_layernorm(self.q_a_proj(x))[0]
        self._tap("query_latent", positions, latent)
        q = self._queries(latent, positions, rope)
        self._tap("q", positions, q)
        rows = self._rows(x, positions, rope)
        self._tap("k", positions, self.operations.unpack_keys(rows, self.shape.kv_lora, self.shape.rotary))
        if self.indexer is not None:
            shared[self.layer] = self.indexer(x, latent, positions, rope)
        attended = self._attend(q, rows, shared[self.shape.choosing_layer(self.layer)])
        self._tap("attention", positions, attended)
        values = self.kv_b_proj.values(attended)
        self._tap("values", positions, values)
        return self.o_proj(values.flatten(1))

    def _tap(self, name: str, positions: Tensor, rows: Tensor) -> None:
        tap(layer_tap(self.layer, name), positions, rows)

    def _queries(self, latent: Tensor, positions: Tensor, rope: Rope) -> Tensor:
        shape = self.shape
        q = self.q_b_proj(latent).unflatten(-1, (shape.heads, shape.nope + shape.rotary))
        nope, rotary = q.split([shape.nope, shape.rotary], -1)
        return torch.cat([self.kv_b_proj.absorb(nope), rope(rotary.contiguous(), positions)], -1)

    def _rows(self, x: Tensor, positions: Tensor, rope: Rope) -> Tensor:
        """The packed keys (T, bytes) of this step's tokens."""
        latent, rotary = self.kv_a_proj_with_mqa(x).split([self.shape.kv_lora, self.shape.rotary], -1)
        rotated = rope(rotary.unsqueeze(1).contiguous(), positions).squeeze(1)
        return self.operations.pack_keys(self.kv_a_layernorm(latent.contiguous())[0], rotated)

    def _attend(self, q: Tensor, rows: Tensor, chosen: Tensor) -> Tensor:
        """(T, heads, L): fresh keys go to the cache first, and are read from there like old ones."""
        output = q.new_zeros(*q.shape[:2], self.shape.kv_lora)
        metadata = self.cache.metadata()
        if metadata is None:
            return output
        self.cache.write(rows, metadata.slots)
        for request in metadata.requests():
            part = slice(request.first, request.end)
            output[part] = self._attend_request(q[part], chosen[part], request)
        return output

    def _attend_request(self, q: Tensor, chosen: Tensor, request: Request) -> Tensor:
        """Reads, and dequantises, the chosen rows alone."""
        picked = torch.unique(chosen[chosen >= 0])
        shape = self.shape
        keys = self.operations.unpack_keys(self.cache.read(request, picked), shape.kv_lora, shape.rotary)
        places = torch.searchsorted(picked, chosen.contiguous()).int()
        local = torch.where(chosen < 0, -1, places)
        return self.operations.sparse_attention(q, keys, local, shape.scale, shape.kv_lora)


__all__ = ["Indexer", "RowMetadata", "SparseMla"]
