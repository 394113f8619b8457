"""Scores of the indexer: how much each query wants each key of its sequence.

    w[t, h]  = (proj[t, h] * sq[t, h]) * (H^-1/2 * D^-1/2)
    score    = (sum over heads h, ascending, of relu(fp32(q8[t, h] . k8[n])) * w[t, h]) * sk[n]

with q8, sq and k8, sk from :mod:`.index_keys`. The dot product of e4m3 numbers is exact, as in :mod:`.block_linear`, so
a score depends on its query and its key alone, whatever else is asked or cached. DeepSeek-V3.2, equation 1. The indexer
is frozen: no gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vime_core.numerics.arithmetic import flush, widen


def head_weights(projected: Tensor, query_scales: Tensor, dim: int) -> Tensor:
    """w fp32 (T, H) of the projected x (T, H) and the scales of the quantised queries (T, H)."""
    return flush(widen(projected) * query_scales) * (projected.shape[-1] ** -0.5 * dim**-0.5)


def reference(queries: Tensor, weights: Tensor, keys: Tensor, key_scales: Tensor) -> Tensor:
    """fp32 (T, N) of queries e4m3 (T, H, D), weights fp32 (T, H), keys e4m3 (N, D) and key_scales fp32 (N)."""
    total = torch.zeros(len(queries), len(keys), device=queries.device)
    columns = keys.double().t()
    for head in range(queries.shape[1]):
        dots = torch.mm(queries[:, head].double(), columns).float()
        total = total + flush(dots.clamp_min(0.0) * weights[:, head, None])
    return flush(total * key_scales)
