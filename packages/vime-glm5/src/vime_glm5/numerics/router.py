"""The router: which experts a token takes, in which slots, with which weights.

    logits = linear of the dense contract, in fp32 without a last rounding;  s = 1 / (1 + exp(-logits))
    slots: the k best of s + bias, best first, by the order of :mod:`.top_k`
    weight of slot i = s_i / (((s_0 + s_1) + s_2 ...) + 1e-20), from the scores without the bias

The order of slots is part of the result, since the combine adds them in it. The factor of the routed sum is no part of
the weights (:mod:`.combine`). Gradient, the choice fixed: with S the denominator, ds_i = (dw_i - sum_j dw_j w_j) / S,
dlogit = ds s (1 - s), rounded once; then linear's. The bias has none. DeepSeek-V3 (arXiv 2412.19437), equations 12-16.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vime_core.numerics.arithmetic import exp, flush, narrow, widen
from vime_core.numerics.gradients import needs_gradient, record
from vime_core.numerics.linear import input_gradient, weight_gradient
from vime_glm5.numerics.top_k import best

if TYPE_CHECKING:
    from vime_glm5.numerics.operations import Glm5Operations

_SMALLEST_SUM = 1e-20


def scores_of(logits: Tensor) -> Tensor:
    """The sigmoid, fp32."""
    return flush(torch.reciprocal(exp(-logits) + 1.0))


def normalised(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """(weights (T, k), their denominator (T, 1)) of the chosen scores (T, k)."""
    total = torch.zeros_like(chosen[:, :1])
    for slot in range(chosen.shape[1]):
        total = total + chosen[:, slot, None]
    total = total + _SMALLEST_SUM
    return chosen / total, total


def reference(logits: Tensor, bias: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(experts int64 (T, k), weights fp32 (T, k)) of fp32 logits (T, E) and bias fp32 (E)."""
    scores = scores_of(logits)
    experts = best(scores + bias, k)
    return experts, normalised(scores.gather(1, experts))[0]


def _logits(ops: Glm5Operations, x: Tensor, weight: Tensor) -> Tensor:
    return ops.kernels.linear(x, weight, None, ops.kernels.chunk_count(*weight.shape), True)


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ops: Glm5Operations, x: Tensor, weight: Tensor, bias: Tensor, k: int
    ) -> tuple[Tensor, Tensor]:
        logits = _logits(ops, x, weight)
        experts, weights = ops.glm.route(logits, bias, k)
        ctx.ops = ops
        ctx.save_for_backward(x, weight, logits, experts)
        ctx.mark_non_differentiable(experts)
        return experts, weights

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, logits, experts = ctx.saved_tensors
        scores = scores_of(logits)
        weights, total = normalised(scores.gather(1, experts))
        dw = widen(grads[1])
        mean = torch.zeros_like(total)
        for slot in range(dw.shape[1]):
            mean = mean + (dw * weights)[:, slot, None]
        ds = torch.zeros_like(scores).scatter_(1, experts, (dw - mean) / total)
        dlogits = narrow(ds * scores * (1.0 - scores), x.dtype)
        kernels = ctx.ops.kernels
        return None, input_gradient(kernels, dlogits, weight), weight_gradient(kernels, dlogits, x), None, None


def route(ops: Glm5Operations, x: Tensor, weight: Tensor, bias: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(experts int64 (T, k), weights fp32 (T, k)) of x (T, H), weight (E, H) and bias fp32 (E)."""
    if not needs_gradient(x, weight):
        return ops.glm.route(_logits(ops, x, weight), bias, k)
    return record(_Route, ops, x, weight, bias, k)
