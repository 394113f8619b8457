"""Top-k as a total order: score descending, then index ascending; no two candidates are equal.

Each candidate's key is 64 bits, unique, and compared as an integer: above, the fp32 score's bits mapped to integers of
the same order (-0 equals +0, NaN is the least); below, the complement of the index. So every exact selector on every
device finds the same set. Ties are no rarity: ReLU makes plateaus of exact zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

NONE = -1
_INDEX_MASK = 0xFFFFFFFF
_LEAST = -(2**63)


def order_keys(scores: Tensor) -> Tensor:
    """The unique int64 keys (..., N) of fp32 scores (..., N)."""
    known = torch.where(scores.isnan(), -torch.inf, scores) + 0.0
    bits = known.contiguous().view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    index = torch.arange(scores.shape[-1], device=scores.device)
    return (ordered << 32) | (_INDEX_MASK - index)


def best(scores: Tensor, k: int) -> Tensor:
    """int64 (..., k): the k best indices, best first."""
    chosen = torch.topk(order_keys(scores), k, dim=-1, sorted=True).values
    return _INDEX_MASK - (chosen & _INDEX_MASK)


def reference(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    """The chosen keys of each query, int32 (T, k), ascending by index; -1 behind them where fewer are visible.

    Args:
        scores: fp32 (T, N).
        visible: int64 (T); query t may choose among indices 0 .. visible[t] - 1.
        k: how many to choose.
    """
    count = min(k, scores.shape[1])
    outside = torch.arange(scores.shape[1], device=scores.device) >= visible.unsqueeze(1)
    keys = order_keys(scores).masked_fill(outside, _LEAST)
    chosen = torch.topk(keys, count, dim=-1, sorted=False).values
    index = torch.where(chosen == _LEAST, _INDEX_MASK, _INDEX_MASK - (chosen & _INDEX_MASK)).sort(-1).values
    found = torch.where(index == _INDEX_MASK, NONE, index).int()
    return torch.nn.functional.pad(found, (0, k - count), value=NONE)
