"""The draw: which token a row of logits gives for a random number. It decides tokens, never what they are worth.

    z = fp32(logits) / T,  m = max z,  w_i = floor(exp(z_i - m) * 2^40),  W = sum of w
    the token is the first id i with w_0 + ... + w_i > r,  r = min(floor(s * W), W - 1),  s = floor(u / 2^10) / 2^53

u is one of the numbers below 2^63 that a torch generator with the request's seed gives, one a sampled token; s * W is
one product of fp64. Integer sums have no order, so every algorithm on every device draws the same token from the same
logits. T = 0 and a negative u take the first id of the largest z. NaN and -inf weigh nothing; nor do tokens that are
2^40 times less likely than the likeliest, together less than a millionth of the probability.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vime_core.numerics.arithmetic import exp, widen
from vime_core.numerics.log_probs import row_temperatures

if TYPE_CHECKING:
    from vime_core.numerics.kernels import Kernels

_WEIGHT_ONE = 2.0**40


def next_number(generator: torch.Generator) -> Tensor:
    """The next u of a request: int64, on the generator's device."""
    return torch.empty((), dtype=torch.int64, device=generator.device).random_(generator=generator)


def numbers(seed: int, count: int, device: torch.device) -> Tensor:
    """The first ``count`` u of a request with ``seed``, int64 (count)."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.stack([next_number(generator) for _ in range(count)])


def reference(logits: Tensor, temperatures: Tensor, u: Tensor) -> Tensor:
    """Tokens int64 (rows) of logits (rows, V), temperatures fp32 (rows) and u int64 (rows)."""
    z = widen(logits) / temperatures.unsqueeze(-1)
    z = torch.where(z.isnan(), -torch.inf, z)
    peak = z.amax(-1, keepdim=True)
    drawn = (exp(z - peak).double() * _WEIGHT_ONE).nan_to_num(0.0).long()
    weights = torch.where((u < 0).unsqueeze(-1), (z == peak).long(), drawn)
    total = weights.sum(-1)
    share = (u.clamp_min(0) >> 10).double() * 2.0**-53
    target = torch.minimum((share * total.double()).long(), total - 1)
    found = torch.searchsorted(weights.cumsum(-1), target.unsqueeze(-1), right=True).squeeze(-1)
    return torch.where(total > 0, found, 0)


def draw(kernels: Kernels, logits: Tensor, u: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    """The token of each row of logits (rows, V) for u int64 (rows): int64 (rows); T for all, or one for each row."""
    greedy = torch.as_tensor(temperature, device=logits.device).reshape(-1).expand(len(logits)) == 0
    return kernels.draw(logits, row_temperatures(temperature, logits), torch.where(greedy, -1, u))
