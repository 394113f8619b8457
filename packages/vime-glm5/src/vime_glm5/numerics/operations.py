"""The object that both sides of ``glm5/v1`` are built from: the dense operations, and those of GLM-5 on top."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from vime_core.numerics import Operations
from vime_glm5.numerics import absorbed, block_linear, combine, experts, index_scores, latent_codec, router
from vime_glm5.numerics import sparse_attention as attention
from vime_glm5.numerics.absorbed import AbsorbedWeights
from vime_glm5.numerics.e4m3 import BlockWeight
from vime_glm5.numerics.experts import Weights
from vime_glm5.numerics.kernels import Glm5Kernels
from vime_glm5.numerics.latent_codec import CacheKind


@dataclass(frozen=True)
class Glm5Operations(Operations):
    """`Operations` with those of GLM-5. Each method is the entry of the module of its name.

    Args:
        glm: the provider's functions beyond the dense ones.
        cache_kind: how keys are kept, as the contract says.
    """

    glm: Glm5Kernels
    cache_kind: CacheKind

    def block_linear(self, x: Tensor, weight: Tensor | BlockWeight, parts: int = 1) -> Tensor:
        return block_linear.block_linear(self, x, weight, parts)

    def quantise_weight(self, weight: Tensor, parts: int = 1) -> BlockWeight:
        return self.glm.quantise_weight(weight, parts)

    def absorbed_weights(self, weight: Tensor, heads: int, nope: int) -> AbsorbedWeights:
        return absorbed.absorbed_weights(self, weight, heads, nope)

    def head_linear(self, x: Tensor, weights: Tensor) -> Tensor:
        return absorbed.head_linear(self, x, weights)

    def cached_keys(self, latent: Tensor, rotated: Tensor) -> Tensor:
        return latent_codec.cached_keys(self, latent, rotated)

    def pack_keys(self, latent: Tensor, rotated: Tensor) -> Tensor:
        """uint8 (T, bytes) for the cache; without a gradient."""
        return self.glm.pack(self.cache_kind, latent, rotated)

    def unpack_keys(self, rows: Tensor, latent: int, rotary: int) -> Tensor:
        """bf16 (T, L + R) of the cache's rows."""
        return self.glm.unpack(self.cache_kind, rows, latent, rotary)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """Without a gradient, as everything of the indexer."""
        return self.glm.layer_norm(x, weight, bias, eps)

    def index_queries(self, queries: Tensor, projected: Tensor) -> tuple[Tensor, Tensor]:
        """(e4m3 (T, H, D), weights fp32 (T, H)) of queries (T, H, D) and the projected x (T, H)."""
        q, scales = self.glm.index_quantise(queries)
        return q, index_scores.head_weights(projected, scales, queries.shape[-1])

    def choose_keys(self, queries: Tensor, weights: Tensor, rows: Tensor, visible: Tensor, k: int) -> Tensor:
        """int32 (T, k): what each query attends to, of the packed index keys (N, D + 4) of its sequence."""
        keys, scales = self.glm.index_unpack(rows)
        return self.glm.top_k(self.glm.index_scores(queries, weights, keys, scales), visible, k)

    def pack_index_keys(self, keys: Tensor) -> Tensor:
        """uint8 (T, D + 4) of index keys (T, D)."""
        return self.glm.index_pack(keys)

    def sparse_attention(self, q: Tensor, keys: Tensor, chosen: Tensor, scale: float, latent: int) -> Tensor:
        return attention.sparse_attention(self, q, keys, chosen, scale, latent)

    def route(self, x: Tensor, weight: Tensor, bias: Tensor, k: int) -> tuple[Tensor, Tensor]:
        return router.route(self, x, weight, bias, k)

    def run_experts(self, x: Tensor, choice: Tensor, fc1: Weights, fc2: Weights) -> Tensor:
        return experts.run_experts(self, x, choice, fc1, fc2)

    def combine(self, rows: Tensor, weights: Tensor, shared: Tensor, factor: float) -> Tensor:
        return combine.combine(self, rows, weights, shared, factor)
