"""The draw: which token a row of logits gives for a random number. It decides tokens, never what they are worth.

    z = fp32(logits) / T,  m = max z,  w_i = floor(exp(z_i - m) * 2^40),  W = sum of w
    the token is the first id i with w_0 + ... + w_i > r,  r = min(floor(s * W), W - 1),  s = floor(u / 2^10) / 2^53

s * W is one product of fp64. Integer sums have no order, so every algorithm on every device draws the same token from
the same logits. T = 0 and a negative u take the first id of the largest z. NaN and -inf weigh nothing; nor do tokens
that are 2^40 times less likely than the likeliest, together less than a millionth of the probability.

u, below 2^63, is a function of the request's seed and of the token's place t in the response, counted from 0: no state,
so it is the same in whatever step, order or company a token is drawn. Philox4x32-10 (Salmon, Moraes, Dror, Shaw:
"Parallel random numbers: as easy as 1, 2, 3", 2011) with the two words of the seed modulo 2^64 as its key, the lower
first, and the counter (t, 0, 0, 0) gives four words of 32 bits; u = floor((first * 2^32 + second) / 2).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from vime_core.numerics.arithmetic import exp, flush, widen
from vime_core.numerics.log_probs import row_temperatures, scored_at

if TYPE_CHECKING:
    from vime_core.numerics.kernels import Kernels

WEIGHT_ONE: Final = 2.0**40
PHILOX_ROUNDS: Final = 10
PHILOX_FACTORS: Final = (0xD2511F53, 0xCD9E8D57)
PHILOX_STEPS: Final = (0x9E3779B9, 0xBB67AE85)
_WORD: Final = 0xFFFFFFFF


def numbers(seed: int, count: int, device: torch.device) -> Tensor:
    """The first ``count`` u of a request with ``seed``, int64 (count)."""
    return reference_numbers(torch.full((count,), seed, device=device), torch.arange(count, device=device))


def reference_numbers(seeds: Tensor, places: Tensor) -> Tensor:
    """u of seeds and places in the response, int64 (rows) each."""
    first, second, _, _ = philox((places, 0 * places, 0 * places, 0 * places), (seeds & _WORD, (seeds >> 32) & _WORD))
    return (first << 31) | (second >> 1)


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox4x32-10: four words of four words and a key of two, each int64 below 2^32, of one shape."""
    (a, b, c, d), (k0, k1) = counter, key
    for _ in range(PHILOX_ROUNDS):
        x, y = a * PHILOX_FACTORS[0], c * PHILOX_FACTORS[1]  # modulo 2^64, whose sign the masks take off
        a, b, c, d = ((y >> 32) & _WORD) ^ b ^ k0, y & _WORD, ((x >> 32) & _WORD) ^ d ^ k1, x & _WORD
        k0, k1 = (k0 + PHILOX_STEPS[0]) & _WORD, (k1 + PHILOX_STEPS[1]) & _WORD
    return a, b, c, d


def reference(logits: Tensor, temperatures: Tensor, u: Tensor) -> Tensor:
    """Tokens int64 (rows) of logits (rows, V), temperatures fp32 (rows) and u int64 (rows)."""
    u = torch.where(temperatures == 0, -1, u)
    z = flush(widen(logits) / scored_at(temperatures).unsqueeze(-1))
    z = torch.where(z.isnan(), -torch.inf, z)
    peak = z.amax(-1, keepdim=True)
    drawn = (exp(z - peak).double() * WEIGHT_ONE).nan_to_num(0.0).long()
    weights = torch.where((u < 0).unsqueeze(-1), (z == peak).long(), drawn)
    total = weights.sum(-1)
    share = (u.clamp_min(0) >> 10).double() * 2.0**-53
    target = torch.minimum((share * total.double()).long(), total - 1)
    found = torch.searchsorted(weights.cumsum(-1), target.unsqueeze(-1), right=True).squeeze(-1)
    return torch.where(total > 0, found, 0)


def draw(kernels: Kernels, logits: Tensor, u: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    """The token of each row of logits (rows, V) for u int64 (rows): int64 (rows); T for all, or one for each row."""
    return kernels.draw(logits, row_temperatures(temperature, logits), u)
