"""Causal attention over packed sequences.

On the CPU one sequence after another, so that no sequence's numbers depend on another's: the softmax is written out
and its scores are computed again in the backward, which is three times as fast as torch's fused kernel at these lengths
and keeps no [n, n] matrix. On CUDA torch's flash kernels take the whole pack in one call; their deterministic backward
adds the gradient of the queries in as many parts as the number of sequences leaves multiprocessors for.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from vime_megatron.autograd import apply


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], scale: float, starts: Tensor | None = None
) -> Tensor:
    """Causal attention within each sequence of a pack.

    Args:
        query: [T, heads, D].
        key: [T, groups, D]; heads is a multiple of groups.
        value: like ``key``.
        lengths: tokens of each sequence; they sum to T.
        scale: factor on the scores.
        starts: int32 [sequences + 1] on the device, the first token of each sequence, and T; for a single call on a
            GPU.

    Returns:
        [T, heads, D] in the query's dtype.
    """
    if query.is_cuda:
        if starts is not None and takes_packs(query):
            return at_once(query, key, value, starts, max(lengths), scale)
        parts = zip(*(tensor.split(list(lengths)) for tensor in (query, key, value)), strict=True)
        return torch.cat([_fused(q, k, v, scale) for q, k, v in parts])
    return apply(_CausalSoftmax, query, key, value, tuple(lengths), scale)


def takes_packs(query: Tensor) -> bool:
    """Whether torch's flash kernel has an entry for packs of this dtype and head size."""
    return query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256


def at_once(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, scale: float) -> Tensor:
    """All sequences in one call of the flash kernel, [T, heads, D]; ``longest`` is the most tokens of a sequence."""
    flash: Any = torch.ops.aten._flash_attention_forward
    return flash(query, key, value, starts, starts, longest, longest, 0.0, True, False, scale=scale)[0]


def _fused(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Flash attention where it exists (its backward has a deterministic mode), else the plain formula."""
    backend = SDPBackend.MATH if query.dtype == torch.float32 else SDPBackend.FLASH_ATTENTION
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    with sdpa_kernel(backend):
        output = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return output[0].transpose(0, 1)


class _CausalSoftmax(torch.autograd.Function):
    """softmax(q k^T scale + mask) v with fp32 scores; matrix products in the dtype of the inputs."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...], scale: float) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.lengths, ctx.scale = lengths, scale
        output = torch.empty_like(query)
        for rows in _rows(lengths):
            q, k, v = _by_group(query[rows], key.shape[1]), key[rows].transpose(0, 1), value[rows].transpose(0, 1)
            weights = _weights(q, k, scale)
            output[rows] = _by_token(torch.bmm(weights.to(v.dtype), v), output[rows].shape)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value = ctx.saved_tensors
        d_query, d_key, d_value = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        for rows in _rows(ctx.lengths):
            q, k, v = _by_group(query[rows], key.shape[1]), key[rows].transpose(0, 1), value[rows].transpose(0, 1)
            d_output = _by_group(grads[0][rows], key.shape[1])
            weights = _weights(q, k, ctx.scale)
            d_value[rows] = torch.bmm(weights.to(v.dtype).transpose(1, 2), d_output).transpose(0, 1)
            d_scores = _d_softmax(weights, torch.bmm(d_output, v.transpose(1, 2)).float())
            d_scores = d_scores.mul_(ctx.scale).to(q.dtype)
            d_query[rows] = _by_token(torch.bmm(d_scores, k), query[rows].shape)
            d_key[rows] = torch.bmm(d_scores.transpose(1, 2), q).transpose(0, 1)
        return d_query, d_key, d_value, None, None


def _rows(lengths: Sequence[int]) -> list[slice]:
    return [slice(end - length, end) for end, length in zip(accumulate(lengths), lengths, strict=True)]


def _by_group(x: Tensor, groups: int) -> Tensor:
    """[n, heads, D] to [groups, heads / groups x n, D]: the queries that share a key-value head, below each other."""
    tokens, heads, dim = x.shape
    return x.reshape(tokens, groups, heads // groups, dim).permute(1, 2, 0, 3).reshape(groups, -1, dim)


def _by_token(x: Tensor, shape: torch.Size) -> Tensor:
    """The inverse of `_by_group`, to [n, heads, D]."""
    tokens, heads, dim = shape
    return x.view(x.shape[0], heads // x.shape[0], tokens, dim).permute(2, 0, 1, 3).reshape(shape)


def _weights(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Attention weights, fp32 [groups, heads / groups x n, n]."""
    tokens = k.shape[1]
    future = torch.full((tokens, tokens), -math.inf, device=q.device).triu_(1)
    scores = torch.bmm(q, k.transpose(1, 2)).float().mul_(scale)
    scores.view(q.shape[0], -1, tokens, tokens).add_(future)
    return scores.softmax(-1)


def _d_softmax(weights: Tensor, d_weights: Tensor) -> Tensor:
    """Gradient through a softmax over the last dimension; overwrites ``d_weights``."""
    inner = (weights * d_weights).sum(-1, keepdim=True)
    return d_weights.sub_(inner).mul_(weights)
