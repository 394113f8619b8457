"""Attention within packed sequences of heads that are turned first: :mod:`.rope` of q and k, then :mod:`.attention`.

The same kernels in the same order as the two operations by themselves, and so the same bits; as one step of autograd
it takes a third of the host's time, of which a layer of a small model has little.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vime_core.numerics.attention import AttentionSpec
from vime_core.numerics.gradients import needs_gradient, record

if TYPE_CHECKING:
    from vime_core.numerics.kernels import Kernels

Seen = Callable[[str, Tensor], None]
"""Called with the name and the value of a result on the way."""


def _attend(
    kernels: Kernels,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    table: Tensor,
    cu_seqlens: Tensor,
    spec: AttentionSpec,
    seen: Seen,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The turned q and k, v as it is read, o and lse."""
    q = kernels.rope(q.contiguous(), positions, table, False, False)
    k = kernels.rope(k.contiguous(), positions, table, False, False)
    v = v.clone(memory_format=torch.contiguous_format)  # of one token or head a view may have odd strides
    seen("q_rope", q)
    seen("k_rope", k)
    return q, k, v, *kernels.attention_packed(q, k, v, cu_seqlens, spec)


class _RotaryAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        kernels: Kernels,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        table: Tensor,
        cu_seqlens: Tensor,
        spec: AttentionSpec,
        seen: Seen,
    ) -> Tensor:
        attended = _attend(kernels, q, k, v, positions, table, cu_seqlens, spec, seen)
        ctx.kernels, ctx.spec = kernels, spec
        ctx.save_for_backward(*attended, cu_seqlens, positions, table)
        return attended[3]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse, cu_seqlens, positions, table = ctx.saved_tensors
        kernels: Kernels = ctx.kernels
        dq, dk, dv = kernels.attention_backward(grads[0], q, k, v, o, lse, cu_seqlens, ctx.spec)
        dq, dk = (kernels.rope(x, positions, table, False, True) for x in (dq, dk))
        return None, dq, dk, dv, None, None, None, None, None


def rotary_attention(
    kernels: Kernels,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    table: Tensor,
    cu_seqlens: Tensor,
    spec: AttentionSpec,
    seen: Seen,
) -> Tensor:
    """Whole sequences one after another, of heads that are not turned yet.

    Args:
        q: (T, heads, dim); k and v: (T, KV heads, dim); any strides, all of one dtype.
        positions: (T) within the sequences.
        table: (P, R) of :mod:`.rope_table`, in fp32.
        cu_seqlens: (B + 1) first token of each sequence, and T.
        seen: is given the turned q and k, as ``q_rope`` and ``k_rope``.

    Returns:
        o (T, heads, dim).
    """
    arguments = kernels, q, k, v, positions, table, cu_seqlens, spec, seen
    return record(_RotaryAttention, *arguments) if needs_gradient(q, k, v) else _attend(*arguments)[3]
