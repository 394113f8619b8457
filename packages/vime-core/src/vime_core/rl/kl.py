"""Per-token estimators of KL(policy || reference) from samples of the policy.

Source: J. Schulman, Approximating KL Divergence (joschu.net/blog/kl-approx.html), with log r = reference - policy.
As values, k1 and k3 are unbiased and k2 is biased. As *losses* (differentiated through ``log_probs`` of tokens that
the policy sampled) it is k2 whose expected gradient is that of the KL; the expected gradient of k1 is zero.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

KlEstimator = Literal["k1", "k2", "k3"]


def kl_per_token(estimator: KlEstimator, log_probs_N: Tensor, reference_log_probs_N: Tensor) -> Tensor:
    """fp32 [N], differentiable in ``log_probs_N``; exactly 0 where the two log-probs are equal.

    k1 = -log r; k2 = (log r)^2 / 2; k3 = (r - 1) - log r, computed as expm1(log r) - log r.
    """
    log_ratio = reference_log_probs_N - log_probs_N
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio * log_ratio
    return torch.expm1(log_ratio) - log_ratio
