"""Kernels that a package offers to a provider: what it must supply, and what the provider makes of it.

An offered linear computes the provider's own definition faster. It is taken call by call where a probe finds the same
bits (:mod:`vime_core.numerics.chosen_linear`), so which one runs changes no result. An offered attention has bits of
its own: it *is* the provider's attention wherever it covers a structure, and part of the provider's digest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vime_core.numerics.attention import AttentionSpec, KvCache, PagedBatch

Pass = Literal["forward", "input gradient", "weight gradient"]


@dataclass(frozen=True)
class LinearCall:
    """One of a weight's three products; only the number of tokens, M, is left open.

    Args:
        of: ``forward`` y (M, N) = x w^T; ``input gradient`` dx (M, K) = dy w; ``weight gradient`` dw (N, K) = dy^T x.
        n: rows of the weight (N, K).
        k: its columns.
        wide: whether the result is fp32 instead of bf16.
        bias: whether a bias is added before the one rounding; never offered, but named among the choices.
    """

    of: Pass
    n: int
    k: int
    wide: bool
    bias: bool = False

    def __str__(self) -> str:
        return f"{self.of} {self.n}x{self.k}{' fp32' if self.wide else ''}{' with bias' if self.bias else ''}"


@dataclass(frozen=True)
class LinearOffer:
    """A linear in bf16 that claims to have the bits of the provider's own.

    Args:
        name: as in ``alignment.linear``.
        version: of what runs: library and sources; part of the provider's digest.
        covers: whether it has a kernel for a call at all.
        tokens: numbers of tokens with which every kernel runs that the call can ever use; up to the most at once.
        prepare: builds all of those kernels; afterwards ``run`` neither compiles nor waits for the device.
        run: call and its two operands as they are stored (x and w, dy and w, dy and x) -> result.
        pays: call and number of tokens -> whether ``run`` is faster where the host launches each kernel. While a graph
            is captured, which costs the host nothing later, it is taken anyway.
    """

    name: str
    version: str
    covers: Callable[[LinearCall], bool]
    tokens: Callable[[LinearCall], Sequence[int]]
    prepare: Callable[[Sequence[LinearCall]], None]
    run: Callable[[LinearCall, Tensor, Tensor], Tensor]
    pays: Callable[[LinearCall, int], bool] = lambda _call, _tokens: True


@dataclass(frozen=True)
class AttentionOffer:
    """Attention whose packed and paged entries agree in bits over all phases.

    Args:
        name: as in ``alignment.attention``.
        version: of what runs; part of the provider's digest.
        covers: head dim, dtype and spec -> whether it has a proven kernel; both sides of a contract ask the same.
        packed: see `Kernels.attention_packed`; the gradient is the provider's own, from its o and log-sum-exp.
        paged: see `Kernels.attention_paged`.
    """

    name: str
    version: str
    covers: Callable[[int, torch.dtype, AttentionSpec], bool]
    packed: Callable[[Tensor, Tensor, Tensor, Tensor, AttentionSpec], tuple[Tensor, Tensor]]
    paged: Callable[[Tensor, KvCache, PagedBatch, AttentionSpec, Tensor], None]


@dataclass(frozen=True)
class Offers:
    """What a provider is offered in this process.

    Args:
        linear: taken where its bits are the provider's own; None: none is offered or can run here.
        attention: taken where it covers the structure.
        required: operations (``linear``, ``attention``) that a configuration names an offer for: nothing else will do.
        absent: (operation, why) of what is offered and cannot run here.
    """

    linear: LinearOffer | None = None
    attention: AttentionOffer | None = None
    required: frozenset[str] = frozenset()
    absent: tuple[tuple[str, str], ...] = ()


NO_OFFERS = Offers()
