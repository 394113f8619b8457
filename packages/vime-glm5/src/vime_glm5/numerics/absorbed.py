"""Absorbed MLA: the two halves of kv_b as matrices of each head, and products with one matrix a head.

kv_b's weight (heads * (nope + v), L) is quantised and dequantised in blocks (:mod:`.e4m3`), each element rounded once
to the weight's dtype; then head h owns its rows, the first ``nope`` of them w_kc[h], the other ``v`` of them w_vc[h].

    query:   q'[t, h] = linear(q_nope[t, h], w_kc[h]^T)       (nope -> L)
    output:  o[t, h]  = linear(latent[t, h], w_vc[h])         (L -> v)

with the linear of the dense contract. Gradient: straight through the quantisation; that of each product is linear's.
DeepSeek-V2 (arXiv 2405.04434), section 2.1.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vime_core.numerics.arithmetic import narrow
from vime_core.numerics.gradients import needs_gradient, record
from vime_glm5.numerics.e4m3 import dequantise_weight

if TYPE_CHECKING:
    from vime_glm5.numerics.operations import Glm5Operations


@dataclass(frozen=True)
class AbsorbedWeights:
    """``keys`` (heads, L, nope), that queries are multiplied with, and ``values`` (heads, v, L)."""

    keys: Tensor
    values: Tensor


class _RoundTrip(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ops: Glm5Operations, weight: Tensor) -> Tensor:
        del ctx
        return narrow(dequantise_weight(ops.glm.quantise_weight(weight, 1)), weight.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        del ctx
        return None, grads[0]


def absorbed_weights(ops: Glm5Operations, weight: Tensor, heads: int, nope: int) -> AbsorbedWeights:
    """Of kv_b's master weight (heads * (nope + v), L)."""
    by_head: Tensor = record(_RoundTrip, ops, weight).unflatten(0, (heads, -1))
    return AbsorbedWeights(by_head[:, :nope].transpose(1, 2).contiguous(), by_head[:, nope:].contiguous())


def head_linear(ops: Glm5Operations, x: Tensor, weights: Tensor) -> Tensor:
    """y (T, heads, N) of x (T, heads, K) and one matrix a head (heads, N, K)."""
    parts = [ops.linear(x[:, head].contiguous(), weight) for head, weight in enumerate(weights.unbind(0))]
    stacked = torch.stack(parts, 1)
    return stacked if needs_gradient(x, weights) else stacked.contiguous()
