"""Sparse MLA attention over chosen keys: the attention of the dense contract, whose visible keys are the chosen ones.

    t_i = dot(q, k_i) * scale over the chosen keys i ascending;  m, e_i, l as in vime_core.numerics.attention
    o = rn((sum over i ascending of e_i * k_i[:L], fused multiply-adds) / l)

One latent key (L + R) serves all heads; its first L elements are the value. The same walk serves prefill and decode:
there is neither a split nor a dense shortcut for short prompts, so a query's result is a function of its chosen rows.

Gradient, with p_i = softmax(t) and D = dot(do, o), in fp32: ds_i = p_i (do . k_i[:L] - D) scale;
dq = rn(sum_i ds_i k_i). A key's gradient is the sum over heads ascending of ds_i q + [p_i do | 0] within a query, then
over queries ascending, rounded once; no atomics.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vime_core.numerics import AttentionSpec, KvCache, PagedBatch
from vime_core.numerics.arithmetic import exp, fma, lane_dot, lane_sum, narrow, widen
from vime_core.numerics.gradients import needs_gradient, record
from vime_core.numerics.kernels import Kernels

if TYPE_CHECKING:
    from vime_glm5.numerics.operations import Glm5Operations


_REFERENCE_BYTES = 1 << 29  # how much the reference keeps in lanes at a time


def reference(kernels: Kernels, q: Tensor, keys: Tensor, chosen: Tensor, scale: float, latent: int) -> Tensor:
    """o (T, heads, L), in plain torch, all queries side by side: as many steps for one query as for many."""
    del kernels
    step = max(1, _REFERENCE_BYTES // (64 * q.shape[1] * max(1, chosen.shape[1])))
    parts = zip(torch.split(q, step), torch.split(chosen, step), strict=True)
    return torch.cat([_walk(part, keys, picks, scale, latent) for part, picks in parts])


def _walk(q: Tensor, keys: Tensor, chosen: Tensor, scale: float, latent: int) -> Tensor:
    """o (n, heads, L) of q (n, heads, L + R) over the keys (N, L + R) that are chosen (n, k)."""
    picked, real = keys[chosen.clamp_min(0).long()], chosen >= 0
    t = (lane_dot(q.unsqueeze(2), picked.unsqueeze(1)) * scale).masked_fill(~real.unsqueeze(1), -torch.inf)
    weights = exp(t - t.amax(-1, keepdim=True))
    values, o = widen(picked[..., :latent]), torch.zeros(*q.shape[:2], latent, device=q.device)
    for rank in range(chosen.shape[1]):
        added = fma(weights[:, :, rank, None], values[:, None, rank], o)
        o = torch.where(real[:, rank, None, None], added, o)
    return narrow(o / lane_sum(weights).unsqueeze(-1), q.dtype)


def paged(kernels: Kernels, q: Tensor, keys: Tensor, chosen: Tensor, scale: float, latent: int) -> Tensor:
    """The same by the dense contract's paged attention: every query is a request of one token, a page is one key."""
    rows = keys[:, None, None]
    cache = KvCache(rows, rows)
    start = torch.arange(len(q) + 1, device=q.device)
    batch = PagedBatch(start, (chosen >= 0).sum(1), chosen.clamp_min(0))
    q, attended = q.contiguous(), torch.empty(q.shape, dtype=q.dtype, device=q.device)  # every row is asked
    kernels.attention_paged(q, cache, batch, AttentionSpec(scale), attended)
    return attended[..., :latent].contiguous()


def backward(grad: Tensor, q: Tensor, keys: Tensor, chosen: Tensor, o: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """(dq, dkeys) of the inputs' dtype from grad (T, heads, L)."""
    latent = grad.shape[-1]
    picked = widen(keys)[chosen.clamp_min(0).long()]  # (T, k, L + R)
    dy, wide_q = widen(grad), widen(q)
    scores = torch.bmm(wide_q, picked.mT) * scale
    p = scores.masked_fill((chosen < 0).unsqueeze(1), -torch.inf).softmax(-1)
    ds = p * (torch.bmm(dy, picked[..., :latent].mT) - lane_dot(grad, o).unsqueeze(-1)) * scale
    rows = torch.zeros_like(picked)
    for head in range(q.shape[1]):
        rows = rows + ds[:, head, :, None] * wide_q[:, head, None]
        rows[..., :latent] += p[:, head, :, None] * dy[:, head, None]
    return narrow(torch.bmm(ds, picked), q.dtype), narrow(_by_key(rows, chosen, len(keys)), keys.dtype)


def _by_key(rows: Tensor, chosen: Tensor, count: int) -> Tensor:
    """fp32 (N, W): the rows (T, k, W) of each chosen key, queries ascending; a query chooses a key once."""
    total = torch.zeros(count + 1, rows.shape[-1], device=rows.device)
    places = torch.where(chosen < 0, count, chosen).long()
    for place, row in zip(places.unbind(0), rows.unbind(0), strict=True):
        total[place] = total[place] + row
    return total[:count]


class _SparseAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ops: Glm5Operations, q: Tensor, keys: Tensor, chosen: Tensor, scale: float, latent: int
    ) -> Tensor:
        o = ops.glm.attend(ops.kernels, q, keys, chosen, scale, latent)
        ctx.ops, ctx.scale = ops, scale
        ctx.save_for_backward(q, keys, chosen, o)
        return o

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dq, dkeys = ctx.ops.glm.attend_backward(grads[0].contiguous(), *ctx.saved_tensors, ctx.scale)
        return None, dq, dkeys, None, None, None


def sparse_attention(ops: Glm5Operations, q: Tensor, keys: Tensor, chosen: Tensor, scale: float, latent: int) -> Tensor:
    """o (T, heads, L).

    Args:
        ops: the operations.
        q: (T, heads, L + R).
        keys: (N, L + R), as they come from the cache.
        chosen: int32 (T, k), ascending, rows of ``keys``; -1 behind them. Every query has chosen at least one.
        scale: of the scores.
        latent: L.
    """
    if not needs_gradient(q, keys):
        return ops.glm.attend(ops.kernels, q, keys, chosen, scale, latent)
    return record(_SparseAttention, ops, q, keys, chosen, scale, latent)
