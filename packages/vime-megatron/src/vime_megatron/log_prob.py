"""Log-probs of chosen tokens from logits, without an fp32 copy of all logits at once."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vime_megatron.autograd import apply

CHUNK_ELEMENTS = 1 << 22
"""Logits that are held in fp32 at a time. Chunks are whole tokens: they change no bit."""
DEVICE_CHUNK_ELEMENTS = 1 << 27
"""The same on a GPU, where small chunks would be many launches."""


def token_log_probs(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """``log_softmax(fp32(logits) / temperature)`` at the targets.

    Args:
        logits: [N, V] in the training dtype.
        targets: int64 [N].
        temperature: of the sampling distribution; at 0 (greedy) log-probs are defined at 1.

    Returns:
        fp32 [N].
    """
    return apply(_TokenLogProbs, logits, targets, temperature or 1.0)


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
        ctx.save_for_backward(logits, targets)
        ctx.temperature = temperature
        chosen = [
            _scaled(part, temperature).log_softmax(-1).gather(-1, ids[:, None])[:, 0]
            for part, ids in zip(*_chunks(logits, targets), strict=True)
        ]
        return torch.cat(chosen)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """d log p[target] / d logit = (1[target] - p) / temperature."""
        logits, targets = ctx.saved_tensors
        d_logits = torch.empty_like(logits)
        scaled = (grads[0] / ctx.temperature)[:, None]
        for part, ids, grad, out in zip(*_chunks(logits, targets, scaled, d_logits), strict=True):
            slopes = _scaled(part, ctx.temperature).softmax(-1).mul_(-grad)
            at_target = slopes.gather(-1, ids[:, None]) + grad
            out.copy_(slopes.scatter_(-1, ids[:, None], at_target))
        return d_logits, None, None


def _chunks(first: Tensor, *others: Tensor) -> list[tuple[Tensor, ...]]:
    elements = DEVICE_CHUNK_ELEMENTS if first.is_cuda else CHUNK_ELEMENTS
    rows = max(1, elements // first.shape[-1])
    return [tensor.split(rows) for tensor in (first, *others)]


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    return logits.float() if temperature == 1.0 else logits.float() / temperature
