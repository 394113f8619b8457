"""An offered attention in the place of the provider's own, wherever it covers the structure.

Its bits are its own, so nothing else may decide than what both sides of a contract know alike: head dim, dtype and
spec. The gradient stays the provider's: it needs the output and the log-sum-exp only, and a sequence's does not depend
on its company, which that of FlashAttention does.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from vime_core.errors import PolicyError
from vime_core.numerics.attention import AttentionSpec, KvCache, PagedBatch
from vime_core.numerics.kernels import Kernels
from vime_core.numerics.offers import AttentionOffer


@dataclass(frozen=True)
class ChosenAttention:
    """Both entries of attention; see the module.

    Args:
        own: the provider's kernels.
        offer: what comes before them.
        required: whether a structure that the offer does not cover is refused.
        seen: whether the offer serves, by head dim, dtype and spec.
    """

    own: Kernels
    offer: AttentionOffer
    required: bool = False
    seen: dict[tuple[int, torch.dtype, AttentionSpec], bool] = field(
        default_factory=dict[tuple[int, torch.dtype, AttentionSpec], bool]
    )

    def packed(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
        """See `Kernels.attention_packed`."""
        attend = self.offer.packed if self._serves(q, spec) else self.own.attention_packed
        return attend(q, k, v, cu_seqlens, spec)

    def paged(self, q: Tensor, cache: KvCache, batch: PagedBatch, spec: AttentionSpec, o: Tensor) -> None:
        """See `Kernels.attention_paged`."""
        attend = self.offer.paged if self._serves(q, spec) else self.own.attention_paged
        attend(q, cache, batch, spec, o)

    def _serves(self, q: Tensor, spec: AttentionSpec) -> bool:
        key = q.shape[-1], q.dtype, spec
        if key not in self.seen:
            self.seen[key] = self.offer.covers(*key)
            if self.required and not self.seen[key]:
                raise PolicyError(
                    f"alignment.attention = {self.offer.name!r} has no proven kernel for the {_name(*key)}",
                    remedy='Set alignment.attention = "auto" or "own".',
                    code="VIME-ALIGN-011",
                )
        return self.seen[key]

    def choices(self) -> dict[str, str]:
        """Attention, by head size -> what served it."""
        none = f"own ({self.offer.name} has no proven kernel)"
        found = {_name(*key): self.offer.name if covered else none for key, covered in self.seen.items()}
        return dict(sorted(found.items()))


def with_attention(own: Kernels, offer: AttentionOffer, *, required: bool) -> Kernels:
    """``own`` with the offered attention where it covers the structure; ``required``: others are refused."""
    chosen = ChosenAttention(own, offer, required)
    return replace(own, attention_packed=chosen.packed, attention_paged=chosen.paged, choices=chosen.choices)


def _name(head_dim: int, dtype: torch.dtype, spec: AttentionSpec) -> str:
    limits = {"window": spec.window, "soft cap": spec.soft_cap}
    stated = "".join(f", {name} {value}" for name, value in limits.items() if value is not None)
    return f"attention of head size {head_dim} in {str(dtype).removeprefix('torch.')}{stated}"
