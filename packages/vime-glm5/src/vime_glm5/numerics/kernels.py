"""What a provider supplies beyond the dense operations: forward and backward, without autograd."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from torch import Tensor

from vime_core.numerics.kernels import Kernels
from vime_glm5.numerics import (
    block_linear,
    combine,
    e4m3,
    index_keys,
    index_scores,
    latent_codec,
    layer_norm,
    router,
    sparse_attention,
    top_k,
)
from vime_glm5.numerics.e4m3 import BlockWeight
from vime_glm5.numerics.latent_codec import CacheKind


@dataclass(frozen=True)
class Glm5Kernels:
    """The operations of one provider; shapes and meaning are those of the modules that are named.

    Attributes:
        quantise_weight: master (N, K), parts -> quantised (:mod:`.e4m3`).
        block_linear: x, quantised -> y (:mod:`.block_linear`).
        pack: kind, latent, rotated -> bytes (:mod:`.latent_codec`).
        unpack: kind, bytes, L, R -> keys.
        index_quantise: x -> e4m3, scales (:mod:`.index_keys`).
        index_pack: keys -> bytes.
        index_unpack: bytes -> e4m3, scales.
        index_scores: queries, weights, keys, scales -> scores (:mod:`.index_scores`).
        top_k: scores, visible, k -> chosen indices (:mod:`.top_k`).
        attend: dense kernels, q, keys, chosen, scale, L -> o (:mod:`.sparse_attention`).
        attend_backward: do, q, keys, chosen, o, scale -> dq, dkeys.
        route: logits, bias, k -> experts, weights (:mod:`.router`).
        combine: rows, weights -> routed (:mod:`.combine`).
        add_shared: routed, shared, factor -> out.
        layer_norm: x, weight, bias, eps -> y (:mod:`.layer_norm`).
    """

    quantise_weight: Callable[[Tensor, int], BlockWeight]
    block_linear: Callable[[Tensor, BlockWeight], Tensor]
    pack: Callable[[CacheKind, Tensor, Tensor], Tensor]
    unpack: Callable[[CacheKind, Tensor, int, int], Tensor]
    index_quantise: Callable[[Tensor], tuple[Tensor, Tensor]]
    index_pack: Callable[[Tensor], Tensor]
    index_unpack: Callable[[Tensor], tuple[Tensor, Tensor]]
    index_scores: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    top_k: Callable[[Tensor, Tensor, int], Tensor]
    attend: Callable[[Kernels, Tensor, Tensor, Tensor, float, int], Tensor]
    attend_backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    route: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
    combine: Callable[[Tensor, Tensor], Tensor]
    add_shared: Callable[[Tensor, Tensor, float], Tensor]
    layer_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]


REFERENCE = Glm5Kernels(
    quantise_weight=e4m3.quantise_weight,
    block_linear=block_linear.reference,
    pack=latent_codec.pack,
    unpack=latent_codec.unpack,
    index_quantise=index_keys.quantise,
    index_pack=index_keys.pack,
    index_unpack=index_keys.unpack,
    index_scores=index_scores.reference,
    top_k=top_k.reference,
    attend=sparse_attention.reference,
    attend_backward=sparse_attention.backward,
    route=router.reference,
    combine=combine.reference,
    add_shared=combine.add_shared,
    layer_norm=layer_norm.reference,
)
"""Plain torch, on CPU or GPU; what the dense contract has runs on its provider."""

BY_PROVIDER: Final = {"cpu": replace(REFERENCE, attend=sparse_attention.paged)}
"""Providers of the dense contract whose paged attention takes keys of this size, one a page; others: `REFERENCE`."""
