"""The provider ``collective``: a route-preserving all-to-all over gloo or NCCL.

Every route travels alone, its row and its expert's number as bytes, to the rank that holds the expert; the expert's row
travels back to the token's owner. Rows are sorted by owner, then token, then slot.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from vime_core.errors import ContractViolation
from vime_glm5.ranks.types import Arrivals, held_by


@dataclass(frozen=True)
class _Way:
    """``order`` (T k) names the routes, token * k + slot, sorted by owner; how many go to and come from each rank."""

    order: Tensor
    sent: list[int]
    received: list[int]


@dataclass(frozen=True)
class Collective:
    """See `vime_glm5.ranks.types.Ranks`.

    Args:
        group: of the ranks, on gloo or NCCL.
        experts: E of the layer, a multiple of the ranks.
    """

    group: dist.ProcessGroup
    experts: int

    def __post_init__(self) -> None:
        held_by(0, self.size, self.experts)

    @property
    def size(self) -> int:
        """R."""
        return dist.get_world_size(self.group)

    @property
    def held(self) -> range:
        return held_by(dist.get_rank(self.group), self.size, self.experts)

    def dispatch(self, x: Tensor, choice: Tensor, weights: Tensor) -> tuple[Tensor, Arrivals]:
        del weights
        arrivals = self._meet(choice)
        return self.send(arrivals, x.repeat_interleave(choice.shape[1], 0)), arrivals

    def send(self, arrivals: Arrivals, rows: Tensor) -> Tensor:
        way: _Way = arrivals.way
        packed = rows[way.order].contiguous().view(torch.uint8)
        return self._exchange(packed, way.sent, way.received).view(rows.dtype)

    def give_back(self, arrivals: Arrivals, rows: Tensor) -> Tensor:
        way: _Way = arrivals.way
        packed = self._exchange(rows.contiguous().view(torch.uint8), way.received, way.sent).view(rows.dtype)
        return packed[torch.argsort(way.order)]

    def _meet(self, choice: Tensor) -> Arrivals:
        """Sort the routes, and learn which expert each row that comes here is for."""
        flat, each = choice.flatten(), self.experts // self.size
        owners = flat // each
        order = torch.argsort(owners, stable=True)
        sent = _integers(torch.bincount(owners, minlength=self.size))
        received = self._announce(sent, choice.device)
        numbers = flat[order].to(torch.int32).unsqueeze(1).contiguous().view(torch.uint8)
        experts = self._exchange(numbers, sent, received).view(torch.int32).squeeze(1).long()
        if bool(((experts < self.held.start) | (experts >= self.held.stop)).any()):
            raise ContractViolation(
                f"a route for another rank's expert came to the rank that holds {self.held}",
                remedy="The ranks disagree about who holds which expert; start them with one configuration.",
                code="VIME-ALIGN-076",
            )
        return Arrivals(experts - self.held.start, _Way(order, sent, received))

    def _exchange(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """uint8 (sum of received, B): blocks of rows (sum of sent, B), one for each rank, lower ranks first."""
        result = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(result, rows.contiguous(), received, sent, group=self.group)
        return result

    def _announce(self, sent: list[int], device: torch.device) -> list[int]:
        """How many routes each rank sends here."""
        mine = torch.tensor(sent, device=device)
        theirs = torch.empty_like(mine)
        dist.all_to_all_single(theirs, mine, group=self.group)
        return _integers(theirs)


def _integers(x: Tensor) -> list[int]:
    return cast("list[int]", cast("Any", x).tolist())
