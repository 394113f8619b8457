"""The indexer's quantisation: e4m3 in one group over its head dimension, with a scale that is a power of two (UE8M0).

    s = 2^ceil(log2(max(amax, 1e-4) / 448)),   q = e4m3(clamp(x / s, -448, 448))

The logarithm is exact integer work on the exponent. A key's row in the cache is [D e4m3 | fp32 scale]: 132 bytes for
D = 128. No Hadamard rotation, as in vLLM. DeepSeek-V3.2's indexer.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import torch
from torch import Tensor

from vime_core.numerics.arithmetic import widen
from vime_glm5.numerics.e4m3 import E4M3, round_e4m3, scale_of

_FLOOR = 1e-4
_EXPONENT_BIAS, _SIGNIFICAND_BITS = 127, 23  # of fp32; no scale is subnormal


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """(q e4m3 (..., D), scales fp32 (...)) of x (..., D)."""
    wide = widen(x)
    mantissa, exponent = torch.frexp(scale_of(wide.abs().amax(-1), _FLOOR))
    power = torch.where(mantissa == 0.5, exponent - 1, exponent)
    scales = ((power + _EXPONENT_BIAS) << _SIGNIFICAND_BITS).view(torch.float32)
    return round_e4m3(wide, scales.unsqueeze(-1)), scales


def pack(x: Tensor) -> Tensor:
    """uint8 (T, D + 4) of keys x (T, D)."""
    q, scales = quantise(x)
    return torch.cat([q.view(torch.uint8), scales.unsqueeze(-1).view(torch.uint8)], -1)


def unpack(rows: Tensor) -> tuple[Tensor, Tensor]:
    """(q e4m3 (T, D), scales fp32 (T)) of packed rows."""
    q, scales = rows.split([rows.shape[-1] - 4, 4], -1)
    return q.contiguous().view(E4M3), scales.contiguous().view(torch.float32).squeeze(-1)
