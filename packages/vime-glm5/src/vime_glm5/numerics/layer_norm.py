"""LayerNorm of the indexer's keys: y = rn(((x - m) * 1/sqrt(v + eps)) * w + b), all in fp32.

m = lane_sum(x) / D and v = lane_sum((x - m)^2) / D, in lanes (vime_core.numerics.arithmetic). The indexer is frozen, so
there is no gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vime_core.numerics.arithmetic import lane_sum, narrow, sqrt, widen


def reference(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """y (..., D) of x (..., D), weight and bias (D)."""
    wide = widen(x)
    size = torch.full_like(wide[..., 0], float(x.shape[-1]))
    centred = wide - (lane_sum(wide) / size).unsqueeze(-1)
    inverse = torch.reciprocal(sqrt(lane_sum(centred * centred) / size + eps)).unsqueeze(-1)
    return narrow(centred * inverse * widen(weight) + widen(bias), x.dtype)
