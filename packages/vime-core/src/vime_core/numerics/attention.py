"""Causal attention of grouped queries: one definition, entered packed (trainer) or paged (engine), the same bits.

For the query at position p, over its visible keys j_0 < j_1 < ... (all up to p, or the last ``window`` of them):

    t_i = dot(q, k_{j_i}) * scale;  with a soft cap c: t_i = c * tanh(t_i / c)           dot: arithmetic.lane_dot
    m = max t_i,  e_i = exp(t_i - m),  l = lane_sum(e)
    o = rn((sum over i ascending of e_i * v_{j_i}, fused multiply-adds) / l),  lse = m + ln l

A query's result is a function of its own visible keys in ascending order and of nothing else: neither of the batch,
of the chunk that it came in, of the page size nor of where its pages lie. Keys are read only through the block table,
and never one that is not visible. The walk (direction, block, fp32 weights) is a parameter of the provider; a split of
long contexts would have to sit at fixed absolute positions.

The paged entry writes into a tensor that it is given. Rows that no request asks (behind the last one: a decode graph of
vLLM runs padded) stay as they are there, as in vLLM's own backends: to clear them would cost every layer a fill of all
rows, mostly of rows that are written right after. Nothing may read them; no operation of a contract lets a row see
another, their keys have a negative slot, and no logits are asked of them.

Gradient, with D = dot(dy, o) and p_i = exp(t_i - lse): dv += p_i dy, dt_i = p_i (dot(dy, v_i) - D), through the cap
and the scale into dq += dt_i k_i and dk += dt_i q; a key's sum runs over heads, then queries, ascending; no atomics.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from vime_core.numerics.arithmetic import exp, fma, lane_dot, lane_sum, log, narrow, widen
from vime_core.numerics.gradients import needs_gradient, record
from vime_core.numerics.soft_cap import capped

if TYPE_CHECKING:
    from vime_core.numerics.kernels import Kernels


@dataclass(frozen=True)
class AttentionSpec:
    """What a structure fixes about its attention.

    Args:
        scale: factor of the scores, usually head_dim ** -0.5.
        window: how many keys a query sees at most, itself included; None: all.
        soft_cap: bound of the scores' size; None: none.
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None


@dataclass(frozen=True)
class KvCache:
    """Keys and values, each (pages, KV heads, page size, head dim); any strides but that of the head dim."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True)
class PagedBatch:
    """Which tokens ask which pages.

    Args:
        query_start: (B + 1) first query token of each request, and the end.
        seq_lens: (B) tokens of each request in the cache, the present queries included.
        block_table: (B, at least as many pages as the longest request has) page numbers.
        most_queries: a bound of what one request asks, where the host knows one; None: all tokens.
    """

    query_start: Tensor
    seq_lens: Tensor
    block_table: Tensor
    most_queries: int | None = None


def _scores(q: Tensor, k: Tensor, spec: AttentionSpec) -> Tensor:
    """(heads, queries, keys) of q (heads, queries, dim) and k (KV heads, keys, dim), scaled and capped."""
    group = q.shape[0] // k.shape[0]
    raw = torch.stack([lane_dot(q[h, :, None], k[h // group, None]) for h in range(q.shape[0])])
    scaled = raw * spec.scale
    return scaled if spec.soft_cap is None else capped(scaled, spec.soft_cap) * spec.soft_cap


def _visible(queries: int, first: int, spec: AttentionSpec, device: torch.device) -> tuple[Tensor, Tensor]:
    """For every query its keys in ascending order, (queries, most), and which entries are real."""
    position = first + torch.arange(queries, device=device)
    start = (position - (spec.window or first + queries) + 1).clamp_min(0)
    count = position - start + 1
    rank = torch.arange(int(count.max()) if queries else 0, device=device)
    real = rank < count.unsqueeze(1)
    return torch.where(real, start.unsqueeze(1) + rank, 0), real


def _attend(q: Tensor, k: Tensor, v: Tensor, first: int, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """(o, lse) of q (n, heads, dim) at positions first.. over k and v (keys, KV heads, dim) of one sequence."""
    keys, real = _visible(q.shape[0], first, spec, q.device)
    scores = _scores(q.transpose(0, 1), k.transpose(0, 1), spec)
    t = scores.gather(2, keys.expand(len(scores), -1, -1)).masked_fill(~real, -torch.inf)
    largest = t.amax(-1, keepdim=True)
    weights = exp(t - largest)
    total = lane_sum(weights)
    values = widen(v).transpose(0, 1).repeat_interleave(q.shape[1] // v.shape[1], 0)
    o = torch.zeros(q.shape[1], q.shape[0], q.shape[2], device=q.device)
    for rank in range(keys.shape[1]):
        added = fma(weights[:, :, rank, None], values[:, keys[:, rank]], o)
        o = torch.where(real[:, rank, None], added, o)
    o = narrow(o / total.unsqueeze(-1), q.dtype).transpose(0, 1).contiguous()
    return o, (largest.squeeze(-1) + log(total)).t().contiguous()


def _integers(x: Tensor) -> list[int]:
    return cast("list[int]", cast("Any", x).tolist())


def _bounds(cu_seqlens: Tensor) -> list[tuple[int, int]]:
    return list(pairwise(_integers(cu_seqlens)))


def reference_packed(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """(o (T, heads, dim), lse (T, heads) in fp32, natural logarithm)."""
    o, lse = torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(q.shape[:2], dtype=torch.float32)
    for a, b in _bounds(cu_seqlens):
        if b > a:
            o[a:b], lse[a:b] = _attend(q[a:b], k[a:b], v[a:b], 0, spec)
    return o, lse


def reference_paged(q: Tensor, cache: KvCache, batch: PagedBatch, spec: AttentionSpec, o: Tensor) -> None:
    """Fills the asked rows of o (T, heads, dim)."""
    page, lengths = cache.keys.shape[2], _integers(batch.seq_lens)
    for request, (a, b) in enumerate(_bounds(batch.query_start)):
        pages = batch.block_table[request, : -(-lengths[request] // page)].long()
        k, v = (t[pages].transpose(1, 2).flatten(0, 1)[: lengths[request]] for t in (cache.keys, cache.values))
        if b > a:
            o[a:b] = _attend(q[a:b], k, v, lengths[request] - (b - a), spec)[0]


def reference_write(k: Tensor, v: Tensor, cache: KvCache, slots: Tensor) -> None:
    """Copies k and v (T, KV heads, dim) to the slots (page * page size + offset); a negative slot is padding."""
    page, real = cache.keys.shape[2], slots >= 0
    block, offset = slots[real] // page, slots[real] % page
    cache.keys[block, :, offset] = k[: len(slots)][real]
    cache.values[block, :, offset] = v[: len(slots)][real]


def _sequence_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, spec: AttentionSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) in fp32 of one sequence; plain matrix products, within a bound of the cpu provider."""
    position = torch.arange(q.shape[0], device=q.device)
    age = position.unsqueeze(1) - position
    visible = (age >= 0) & (age < (spec.window or len(position) + 1))
    group = q.shape[1] // k.shape[1]
    dy, wide_q = widen(grad).transpose(0, 1), widen(q).transpose(0, 1)
    wide_k, wide_v = (widen(t).transpose(0, 1).repeat_interleave(group, 0) for t in (k, v))
    t = _scores(q.transpose(0, 1), k.transpose(0, 1), spec)
    p = exp(t - lse.t().unsqueeze(-1)).masked_fill(~visible, 0.0)
    delta = lane_dot(grad, o).t().unsqueeze(-1)
    slope = 1.0 if spec.soft_cap is None else 1.0 - (t / torch.full_like(t, spec.soft_cap)) ** 2
    ds = p * (dy @ wide_v.mT - delta) * slope * spec.scale
    dq, dk, dv = ds @ wide_k, ds.mT @ wide_q, p.mT @ dy
    per_kv_head = [torch.sum(x.reshape(-1, group, *x.shape[1:]), dim=1).transpose(0, 1) for x in (dk, dv)]
    return dq.transpose(0, 1), per_kv_head[0], per_kv_head[1]


def reference_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, cu_seqlens: Tensor, spec: AttentionSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of the inputs' dtype."""
    results = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v)]
    for a, b in _bounds(cu_seqlens):
        if b > a:
            parts = _sequence_backward(grad[a:b], q[a:b], k[a:b], v[a:b], o[a:b], lse[a:b], spec)
            for result, part in zip(results, parts, strict=True):
                result[a:b] = narrow(part, result.dtype)
    return results[0], results[1], results[2]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kernels: Kernels, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        o, lse = kernels.attention_packed(q, k, v, cu_seqlens, spec)
        ctx.kernels, ctx.spec = kernels, spec
        ctx.save_for_backward(q, k, v, o, lse, cu_seqlens)
        ctx.mark_non_differentiable(lse)
        return o, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, cu_seqlens = ctx.saved_tensors
        return None, *ctx.kernels.attention_backward(grads[0], *tensors, cu_seqlens, ctx.spec), None, None


def attention_packed(
    kernels: Kernels, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """Whole sequences one after another.

    Args:
        q: (T, heads, dim); k and v: (T, KV heads, dim); the last two dimensions contiguous, all of one dtype.
        cu_seqlens: (B + 1) first token of each sequence, and T.

    Returns:
        o (T, heads, dim) and the log-sum-exp of the scores (T, heads), fp32, natural, without a gradient.
    """
    if not needs_gradient(q, k, v):
        return kernels.attention_packed(q, k, v, cu_seqlens, spec)
    return record(_Attention, kernels, q, k, v, cu_seqlens, spec)


def attention_paged(
    kernels: Kernels, q: Tensor, cache: KvCache, batch: PagedBatch, spec: AttentionSpec, out: Tensor | None = None
) -> Tensor:
    """The queries of an engine step over its pages, without a gradient.

    Args:
        q: (T, heads, dim), the last queries of each request; the last two dimensions contiguous.
        out: what o is written into, contiguous, of q's shape and dtype; rows that no request asks stay as they are.
            None: a new tensor, in which they are zeros.

    Returns:
        o (T, heads, dim).

    Raises:
        ValueError: ``out`` is not like q.
    """
    if out is None:
        out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    elif out.shape != q.shape or out.dtype != q.dtype or not out.is_contiguous():
        raise ValueError(f"cannot attend from {q.dtype} {tuple(q.shape)} into {out.dtype} {tuple(out.shape)}")
    kernels.attention_paged(q, cache, batch, spec, out)
    return out
