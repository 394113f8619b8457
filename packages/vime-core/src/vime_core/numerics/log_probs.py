"""The shared log-softmax and the log-prob of given tokens at a temperature.

    z = fp32(logits) / T,  m = max z,  l = ln(lane_sum(exp(z - m)))  over the whole vocabulary
    log p_i = (z_i - m) - l

T = 0 (greedy) is scored at T = 1. Logits of -inf (a recorded top-p or top-k mask) have probability zero. A provider
may take the rows in any portions, the vocabulary never. Gradient: dlogits = rn((onehot - exp(log p)) * (dlogp / T)).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vime_core.errors import ConfigError
from vime_core.numerics.arithmetic import exp, lane_sum, log, narrow, widen
from vime_core.numerics.gradients import needs_gradient, record
from vime_core.numerics.linear import rows_of

if TYPE_CHECKING:
    from vime_core.numerics.kernels import Kernels

_REFERENCE_ELEMENTS = 1 << 24


def row_temperatures(temperature: float | Tensor, like: Tensor) -> Tensor:
    """One fp32 temperature for each row of the logits ``like`` (..., V); 0 stays, and is the kernels' to understand."""
    rows = like.shape[:-1].numel()
    if isinstance(temperature, Tensor):
        given = temperature.to(like.device, torch.float32)
        return given if given.shape == (rows,) else given.reshape(-1).expand(rows)
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ConfigError(f"temperature is {temperature}", remedy="Give a finite temperature of 0 or more.")
    return torch.full((rows,), temperature, dtype=torch.float32, device=like.device)


def scored_at(temperatures: Tensor) -> Tensor:
    """What logits are divided by: 1 in place of 0."""
    return torch.where(temperatures == 0, 1.0, temperatures)


def reference(logits: Tensor, temperatures: Tensor) -> Tensor:
    """log p (..., V) in fp32; temperatures: one for each row."""
    rows = logits.reshape(-1, logits.shape[-1])
    step = max(1, _REFERENCE_ELEMENTS // rows.shape[1])
    parts = [_log_softmax(*part) for part in zip(torch.split(rows, step), torch.split(temperatures, step), strict=True)]
    return torch.cat(parts).reshape(logits.shape) if parts else logits.float()


def _log_softmax(logits: Tensor, temperatures: Tensor) -> Tensor:
    z = widen(logits) / scored_at(temperatures).unsqueeze(-1)
    shifted = z - z.amax(-1, keepdim=True)
    return shifted - log(lane_sum(exp(shifted))).unsqueeze(-1)


def reference_tokens(logits: Tensor, ids: Tensor, temperatures: Tensor) -> Tensor:
    """log p of ids (rows) from logits (rows, V): (rows) in fp32."""
    return reference(logits, temperatures).gather(-1, ids.long().unsqueeze(-1)).squeeze(-1)


def reference_tokens_backward(grad: Tensor, logits: Tensor, ids: Tensor, temperatures: Tensor) -> Tensor:
    """The gradient of logits (rows, V) from grad (rows)."""
    p = exp(reference(logits, temperatures))
    one_hot = torch.zeros_like(p).scatter_(1, ids.long().unsqueeze(-1), 1.0)
    return narrow((one_hot - p) * (grad.float() / scored_at(temperatures)).unsqueeze(-1), logits.dtype)


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernels: Kernels, logits: Tensor, ids: Tensor, temperatures: Tensor) -> Tensor:
        ctx.kernels = kernels
        ctx.save_for_backward(logits, ids, temperatures)
        return kernels.token_log_probs(logits, ids, temperatures)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        return None, ctx.kernels.token_log_probs_backward(grad, *ctx.saved_tensors), None, None


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernels: Kernels, logits: Tensor, temperatures: Tensor) -> Tensor:
        result = kernels.log_softmax(logits, temperatures)
        ctx.save_for_backward(result, temperatures)
        ctx.dtype = logits.dtype
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        result, temperatures = ctx.saved_tensors
        total = grad.double().sum(-1, keepdim=True).float()
        scaled = (grad - exp(result) * total) / scored_at(temperatures).reshape(*result.shape[:-1], 1)
        return None, narrow(scaled, ctx.dtype), None


def log_softmax(kernels: Kernels, logits: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    """log p (..., V) in fp32 of logits (..., V); temperature: one for all, or one for each row."""
    temperatures = row_temperatures(temperature, logits)
    if not needs_gradient(logits):
        return kernels.log_softmax(logits, temperatures)
    return record(_LogSoftmax, kernels, logits, temperatures)


def token_log_probs(kernels: Kernels, logits: Tensor, token_ids: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    """log p (...) in fp32 of token_ids (...) under logits (..., V): the bits of :func:`log_softmax`, gathered."""
    temperatures = row_temperatures(temperature, logits)
    rows = rows_of(logits)
    ids = token_ids if token_ids.dim() == 1 else token_ids.reshape(-1)
    if needs_gradient(logits):
        result: Tensor = record(_TokenLogProbs, kernels, rows, ids, temperatures)
    else:
        result = kernels.token_log_probs(rows, ids, temperatures)
    return result if token_ids.dim() == 1 else result.reshape(token_ids.shape)
