"""The entropy of the policy's distribution over the vocabulary, with its gradient."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 22
"""Logits that are held in fp32 at a time. Chunks are whole tokens."""
DEVICE_CHUNK_ELEMENTS = 1 << 27
"""The same on a GPU, where small chunks would be many launches."""


def token_entropies(logits_NV: Tensor, temperature: float) -> Tensor:
    """``-sum p log p`` in nats, fp32 [N], of ``p = softmax(fp32(logits) / temperature)``, differentiable in the logits.

    A token whose logit is -inf, since top-k or top-p had cut it, is not in the distribution.

    Args:
        logits_NV: [N, V] in the training dtype.
        temperature: of the sampling distribution; at 0 (greedy) it is defined at 1, as log-probs are.
    """
    function: Any = _TokenEntropies
    return function.apply(logits_NV, temperature or 1.0)


class _TokenEntropies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, temperature: float) -> Tensor:
        ctx.save_for_backward(logits)
        ctx.temperature = temperature
        parts = [_surprise(part, temperature) for part in _chunks(logits)]
        return torch.cat([(probabilities * surprise).sum(-1) for probabilities, surprise in parts])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """d entropy / d logit = p * (-log p - entropy) / temperature."""
        (logits,) = ctx.saved_tensors
        d_logits = torch.empty_like(logits)
        scaled = (grads[0] / ctx.temperature)[:, None]
        for part, grad, out in zip(_chunks(logits), _chunks(scaled, like=logits), _chunks(d_logits), strict=True):
            probabilities, surprise = _surprise(part, ctx.temperature)
            entropy = (probabilities * surprise).sum(-1, keepdim=True)
            out.copy_(probabilities * (surprise - entropy) * grad)
        return d_logits, None


def _surprise(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """p and -log p, fp32 [N, V]; both 0 where p is 0."""
    log_probs = (logits.float() / temperature).log_softmax(-1)
    return log_probs.exp(), (-log_probs).masked_fill(log_probs == -torch.inf, 0.0)


def _chunks(values: Tensor, like: Tensor | None = None) -> tuple[Tensor, ...]:
    logits = values if like is None else like
    elements = DEVICE_CHUNK_ELEMENTS if logits.is_cuda else CHUNK_ELEMENTS
    return values.split(max(1, elements // logits.shape[-1]))
