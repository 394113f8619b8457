"""Block FP8: weights in blocks of 128 x 128, activations in groups of 1 x 128, each with one fp32 scale.

    weight:      s = max(amax, 1e-10) / 448,    q = e4m3(clamp(w / s, -448, 448))
    activation:  s = max(amax, 2^-100) / 448,   q likewise

A weight that stacks several projections, [gate | up], is quantised as if they were apart: its blocks end where a
projection ends, as in a checkpoint that keeps them apart.

Divisions are IEEE's. The floor of an activation's scale keeps a group of zeros finite (q = 0) and no scale subnormal;
above it the scale is amax / 448. Blocks at the end of a dimension may be partial; what is missing counts as zeros.
Formula of the checkpoints: DeepSeek-V3 (arXiv 2412.19437), section 3.3; FP32 scales, as on Hopper.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vime_core.numerics.arithmetic import widen

BLOCK = 128
LARGEST = 448.0
E4M3 = torch.float8_e4m3fn
_WEIGHT_FLOOR = 1e-10
_ACTIVATION_FLOOR = 2.0**-100


@dataclass(frozen=True)
class BlockWeight:
    """A quantised weight of ``parts`` stacked projections of n = N / parts rows each.

    Args:
        q: e4m3 (N, K).
        scales: fp32 (parts * ceil(n / 128), ceil(K / 128)), those of each part below one another.
        parts: how many projections.
    """

    q: Tensor
    scales: Tensor
    parts: int = 1

    def row_scales(self) -> Tensor:
        """fp32 (N, ceil(K / 128)): the scales of each row's blocks."""
        by_part = self.scales.unflatten(0, (self.parts, -1)).repeat_interleave(BLOCK, 1)
        return by_part[:, : self.q.shape[0] // self.parts].flatten(0, 1)


def round_e4m3(x: Tensor, scale: Tensor) -> Tensor:
    """e4m3 of x / scale, to nearest even, clamped to the largest number."""
    return (x / scale).clamp(-LARGEST, LARGEST).to(E4M3)


def scale_of(amax: Tensor, floor: float) -> Tensor:
    """max(amax, floor) / 448, by a tensor: CUDA divides by a scalar through its inverse."""
    return amax.clamp_min(floor) / torch.full_like(amax, LARGEST)


def padded(x: Tensor, *multiples: int) -> Tensor:
    """x with zeros behind its last dimensions, up to a multiple each."""
    pads = [p for size, m in zip(reversed(x.shape), reversed(multiples), strict=False) for p in (0, -size % m)]
    return torch.nn.functional.pad(x, pads) if any(pads) else x


def quantise_weight(weight: Tensor, parts: int = 1) -> BlockWeight:
    """Of the master weight (N, K), in bf16 or fp32, of ``parts`` stacked projections."""
    held = [_quantise(part) for part in weight.chunk(parts)]
    q = torch.cat([q.view(torch.uint8) for q, _ in held]).view(E4M3)
    return BlockWeight(q, torch.cat([scales for _, scales in held]), parts)


def _quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    n, k = weight.shape
    wide = padded(widen(weight), BLOCK, BLOCK)
    blocks = wide.view(wide.shape[0] // BLOCK, BLOCK, wide.shape[1] // BLOCK, BLOCK)
    scales = scale_of(blocks.abs().amax((1, 3)), _WEIGHT_FLOOR)
    q = round_e4m3(blocks, scales[:, None, :, None]).view(wide.shape)
    return q[:n, :k].contiguous(), scales


def dequantise_weight(held: BlockWeight) -> Tensor:
    """fp32 (N, K): q * s."""
    return held.q.float() * held.row_scales().repeat_interleave(BLOCK, 1)[:, : held.q.shape[1]]


def quantise_groups(x: Tensor, floor: float = _ACTIVATION_FLOOR) -> tuple[Tensor, Tensor]:
    """(q e4m3 (..., G, 128), scales fp32 (..., G)) of x (..., K), zeros behind a partial last group."""
    groups = padded(widen(x), BLOCK).unflatten(-1, (-1, BLOCK))
    scales = scale_of(groups.abs().amax(-1), floor)
    return round_e4m3(groups, scales.unsqueeze(-1)), scales
