"""What spreads experts over ranks must do: move rows, by route, and add nothing.

Rank r of R holds the experts r E/R .. (r + 1) E/R - 1. A (token, slot) pair is a *route*. Routes reach the rank of
their expert ordered by owner, then token, then slot, with every provider.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from vime_core.errors import PolicyError


@dataclass(frozen=True)
class Arrivals:
    """The n routes that came to this rank's experts.

    Args:
        experts: int64 (n), numbered from this rank's first.
        way: how they came, for the way back; the provider's own.
    """

    experts: Tensor
    way: Any


class Ranks(Protocol):
    """One provider over one process group. Every rank calls the same methods in the same order."""

    @property
    def held(self) -> range:
        """The experts of this rank."""
        ...

    def dispatch(self, x: Tensor, choice: Tensor, weights: Tensor) -> tuple[Tensor, Arrivals]:
        """The rows (n, H) that this rank's experts compute, of x (T, H).

        Args:
            x: of this rank's tokens.
            choice: int64 (T, k) among all experts.
            weights: fp32 (T, k), which stay here; a provider may send them along to check what arrives.

        Raises:
            ContractViolation: what arrived is not what was sent.
        """
        ...

    def send(self, arrivals: Arrivals, rows: Tensor) -> Tensor:
        """(n, H) at the experts of the rows (T k, H) of this rank's routes, by token and slot."""
        ...

    def give_back(self, arrivals: Arrivals, rows: Tensor) -> Tensor:
        """(T k, H) at the owner, by token and slot, of the rows (n, H) of this rank's experts."""
        ...


def held_by(rank: int, ranks: int, experts: int) -> range:
    """The experts of a rank.

    Raises:
        PolicyError: they cannot be spread evenly.
    """
    if experts % ranks:
        raise PolicyError(
            f"{experts} experts cannot be spread evenly over {ranks} ranks",
            remedy="Use a number of ranks that divides n_routed_experts.",
            code="VIME-ALIGN-075",
        )
    each = experts // ranks
    return range(rank * each, (rank + 1) * each)
