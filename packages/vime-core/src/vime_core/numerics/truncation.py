"""Top-k and top-p: which tokens stay, by a total order.

Tokens are ordered by z = fp32(logits) / T descending (so by probability), then by id ascending; NaN comes last and
-0 equals +0. Top-k keeps the first k. Top-p then weighs each kept token with the integer floor(exp(z - m) * 2^32) and
keeps those before which less than p times the sum of the weights lies, p rounded to fp32; the first token always.
Integer sums have no order, so every exact algorithm on every device finds the same set.

A training log-prob uses the mask that the rollout *recorded*; a mask made from newer weights may drop the token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vime_core.numerics.arithmetic import exp, widen
from vime_core.numerics.log_probs import row_temperatures, scored_at

if TYPE_CHECKING:
    from vime_core.numerics.kernels import Kernels

_WEIGHT_ONE = 2.0**32
_ELEMENTS = 1 << 24
"""As many are ordered at once: a sort needs thirty bytes for each."""


def reference(logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Which tokens of logits (rows, V) stay (bool); temperatures, top_k (int64) and top_p (fp32): (rows)."""
    step = max(1, _ELEMENTS // logits.shape[-1])
    cut = [torch.split(tensor, step) for tensor in (logits, temperatures, top_k, top_p)]
    return torch.cat([_keep(*part) for part in zip(*cut, strict=True)])


def _keep(logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    z = widen(logits) / scored_at(temperatures).unsqueeze(-1)
    z = torch.where(z.isnan(), -torch.inf, z) + 0.0
    ordered, order = torch.sort(z, dim=-1, descending=True, stable=True)
    rank = torch.arange(z.shape[-1], device=z.device)
    within = (rank < top_k.unsqueeze(-1)) | (top_k.unsqueeze(-1) <= 0)
    weights = (exp(ordered - ordered[..., :1]).double() * _WEIGHT_ONE).nan_to_num(0.0).long() * within
    before = weights.cumsum(-1) - weights
    limit = (top_p.double() * weights.sum(-1).double()).clamp_min(1.0).unsqueeze(-1)
    keep = within & ((before.double() < limit) | (top_p.unsqueeze(-1) >= 1))
    return torch.zeros_like(keep).scatter_(-1, order, keep)


def keep_mask(
    kernels: Kernels,
    logits: Tensor,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor = 0,
    top_p: float | Tensor = 1.0,
) -> Tensor:
    """Which tokens of logits (rows, V) stay: bool (rows, V). top_k 0 and top_p 1 are off; scalars or (rows)."""
    rows = logits.shape[0]
    k = torch.as_tensor(top_k, device=logits.device).long().reshape(-1).expand(rows)
    p = torch.as_tensor(top_p, device=logits.device).float().reshape(-1).expand(rows)
    return kernels.keep_mask(logits, row_temperatures(temperature, logits), k, p)


def masked(logits: Tensor, keep: Tensor) -> Tensor:
    """Logits with -inf where ``keep`` is False."""
    return logits.masked_fill(~keep, -torch.inf)
