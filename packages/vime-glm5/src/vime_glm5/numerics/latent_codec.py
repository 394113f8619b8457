"""The KV cache's row: the latent after its RMSNorm and the rotated key, packed into bytes.

``fp8`` (656 bytes for L = 512, R = 64):

    [L e4m3 | L / 128 fp32 scales, little endian | R bf16];  s = max(amax, 2^-100) / 448 of each 128,  q = e4m3(x / s)
    unpacked: rn16(q * s), and the rotated key as it was

``bf16`` (1152 bytes): both as they are. The layout is that of FlashMLA's ``fp8_ds_mla`` cache. The trainer applies the
round trip with the identity as gradient; the engine reads fresh keys from the cache like old ones.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from vime_core.errors import PolicyError
from vime_core.numerics.arithmetic import narrow
from vime_core.numerics.gradients import record
from vime_glm5.numerics.e4m3 import BLOCK, E4M3, quantise_groups

if TYPE_CHECKING:
    from vime_glm5.numerics.operations import Glm5Operations

CacheKind = Literal["fp8", "bf16"]


def row_bytes(kind: CacheKind, latent: int, rotary: int) -> int:
    """Bytes of one token in one layer.

    Raises:
        PolicyError: an FP8 latent that is no multiple of 128.
    """
    if kind == "bf16":
        return 2 * (latent + rotary)
    if latent % BLOCK:
        raise PolicyError(
            f"kv_lora_rank = {latent} is no multiple of {BLOCK}, as an FP8 KV cache of glm5/v1 needs it",
            remedy="Use the contract glm5/v1-bf16kv.",
            code="VIME-ALIGN-070",
        )
    return latent + 4 * (latent // BLOCK) + 2 * rotary


def pack(kind: CacheKind, latent: Tensor, rotated: Tensor) -> Tensor:
    """uint8 (T, bytes) of latent (T, L) and rotated (T, R), both bf16."""
    tail = rotated.contiguous().view(torch.uint8)
    if kind == "bf16":
        return torch.cat([latent.contiguous().view(torch.uint8), tail], -1)
    q, scales = quantise_groups(latent)
    return torch.cat([q.flatten(1).view(torch.uint8), scales.contiguous().view(torch.uint8), tail], -1)


def unpack(kind: CacheKind, rows: Tensor, latent: int, rotary: int) -> Tensor:
    """Keys [latent | rotated] bf16 (T, L + R) of packed rows (T, bytes)."""
    if kind == "bf16":
        return rows.contiguous().view(torch.bfloat16)
    groups = latent // BLOCK
    q, scales, tail = rows.split([latent, 4 * groups, 2 * rotary], -1)
    wide = q.contiguous().view(E4M3).float().unflatten(-1, (groups, BLOCK))
    values = wide * scales.contiguous().view(torch.float32).unsqueeze(-1)
    return torch.cat([narrow(values.flatten(1), torch.bfloat16), tail.contiguous().view(torch.bfloat16)], -1)


class _RoundTrip(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ops: Glm5Operations, latent: Tensor, rotated: Tensor) -> Tensor:
        ctx.latent = latent.shape[1]
        rows = ops.glm.pack(ops.cache_kind, latent, rotated)
        return ops.glm.unpack(ops.cache_kind, rows, latent.shape[1], rotated.shape[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        latent, rotated = grads[0].split([ctx.latent, grads[0].shape[1] - ctx.latent], -1)
        return None, latent.contiguous(), rotated.contiguous()


def cached_keys(ops: Glm5Operations, latent: Tensor, rotated: Tensor) -> Tensor:
    """Keys (T, L + R) as they come back from the cache, of latent (T, L) and rotated (T, R)."""
    return record(_RoundTrip, ops, latent, rotated)
