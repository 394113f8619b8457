"""The provider ``collective``: a route-preserving all-to-all over gloo or NCCL.

Rank r of R holds the experts r E/R .. (r + 1) E/R - 1. Every (token, slot) route travels alone, its row and its
expert's number as bytes, to the rank that holds the expert; the expert's row travels back to the token's owner, who
reduces in slot order (:mod:`vime_glm5.numerics.combine`). No sum is taken on the way. Rows are sorted by owner, then
token, then slot; experts are row-invariant, so the forward has the bits of one rank.

Gradient: the rows' gradients go the same way; a weight's gradient is over the rows of all ranks, lower ranks first.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from vime_core.errors import ContractViolation, PolicyError
from vime_core.numerics.gradients import needs_gradient, record
from vime_glm5.numerics import BlockWeight, Glm5Operations
from vime_glm5.numerics.experts import Weights, expert_gradients, over_slots, routes_of, run_experts


@dataclass(frozen=True)
class Collective:
    """Who holds which expert.

    Args:
        group: of the ranks, on gloo or NCCL.
        experts: E of the layer, a multiple of the ranks.
    """

    group: dist.ProcessGroup
    experts: int

    def __post_init__(self) -> None:
        if self.experts % self.size:
            raise PolicyError(
                f"{self.experts} experts cannot be spread evenly over {self.size} ranks",
                remedy="Use a number of ranks that divides n_routed_experts.",
                code="VIME-ALIGN-075",
            )

    @property
    def size(self) -> int:
        """R."""
        return dist.get_world_size(self.group)

    @property
    def held(self) -> range:
        """The experts of this rank."""
        each, rank = self.experts // self.size, dist.get_rank(self.group)
        return range(rank * each, (rank + 1) * each)

    def counts(self, choice: Tensor) -> list[int]:
        """How many routes of ``choice`` (...) each rank gets."""
        owners = choice.flatten() // (self.experts // self.size)
        return _integers(torch.bincount(owners, minlength=self.size))

    def exchange(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """uint8 (sum of received, B): blocks of rows (sum of sent, B), one for each rank, lower ranks first."""
        result = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(result, rows.contiguous(), received, sent, group=self.group)
        return result

    def announce(self, sent: list[int], device: torch.device) -> list[int]:
        """How many routes each rank sends here."""
        mine = torch.tensor(sent, device=device)
        theirs = torch.empty_like(mine)
        dist.all_to_all_single(theirs, mine, group=self.group)
        return _integers(theirs)


def _integers(x: Tensor) -> list[int]:
    return cast("list[int]", cast("Any", x).tolist())


@dataclass(frozen=True)
class Routes:
    """The routes of a choice (T, k), sorted by owner; ``order`` (T k) names them by token * k + slot."""

    order: Tensor
    sent: list[int]
    received: list[int]
    experts: Tensor


def _meet(ranks: Collective, choice: Tensor) -> Routes:
    """Sort the routes, and learn which expert each row that comes here is for."""
    flat = choice.flatten()
    order = torch.argsort(flat // (ranks.experts // ranks.size), stable=True)
    sent = ranks.counts(choice)
    received = ranks.announce(sent, choice.device)
    numbers = flat[order].to(torch.int32).unsqueeze(1).contiguous().view(torch.uint8)
    experts = ranks.exchange(numbers, sent, received).view(torch.int32).squeeze(1).long()
    if bool(((experts < ranks.held.start) | (experts >= ranks.held.stop)).any()):
        raise ContractViolation(
            f"a route for another rank's expert came to the rank that holds {ranks.held}",
            remedy="The ranks disagree about who holds which expert; start them with one configuration.",
            code="VIME-ALIGN-076",
        )
    return Routes(order, sent, received, experts - ranks.held.start)


def _there(ranks: Collective, routes: Routes, rows: Tensor) -> Tensor:
    """Rows (T k, H), by token and slot, to the experts' ranks: (n, H)."""
    packed = rows[routes.order].contiguous().view(torch.uint8)
    return ranks.exchange(packed, routes.sent, routes.received).view(rows.dtype)


def _back(ranks: Collective, routes: Routes, rows: Tensor) -> Tensor:
    """Rows (n, H) of this rank's experts to the tokens' owners: (T k, H), by token and slot."""
    packed = ranks.exchange(rows.contiguous().view(torch.uint8), routes.received, routes.sent).view(rows.dtype)
    result = torch.empty_like(packed)
    result[routes.order] = packed
    return result


def _forward(
    ops: Glm5Operations, ranks: Collective, x: Tensor, choice: Tensor, fc1: Weights, fc2: Weights
) -> tuple[Tensor, Routes, Tensor]:
    """(rows (T, k, H), the routes, what came here (n, H))."""
    routes = _meet(ranks, choice)
    slots = choice.shape[1]
    here = _there(ranks, routes, x.repeat_interleave(slots, 0))
    with torch.no_grad():
        rows = run_experts(ops, here, routes.experts.unsqueeze(1), fc1, fc2).squeeze(1)
    return _back(ranks, routes, rows).unflatten(0, (-1, slots)), routes, here


class _OverRanks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ops: Glm5Operations, ranks: Collective, x: Tensor, choice: Tensor, *weights: Tensor
    ) -> Tensor:
        half = len(weights) // 2
        rows, ctx.routes, here = _forward(ops, ranks, x, choice, weights[:half], weights[half:])
        ctx.ops, ctx.ranks = ops, ranks
        ctx.save_for_backward(here, *weights)
        return rows

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        here, *weights = ctx.saved_tensors
        half, routes = len(weights) // 2, ctx.routes
        grad = _there(ctx.ranks, routes, grads[0].flatten(0, 1))
        dx, found = torch.zeros_like(here), [torch.zeros_like(weight) for weight in weights]
        for expert in range(half):
            mine, _ = routes_of(routes.experts.unsqueeze(1), expert)
            if len(mine):
                parts = expert_gradients(ctx.ops, grad[mine], here[mine], weights[expert], weights[half + expert])
                dx[mine], found[expert], found[half + expert] = parts
        rows = _back(ctx.ranks, routes, dx).unflatten(0, grads[0].shape[:2])
        return None, None, over_slots(rows), None, *found


def run_experts_over_ranks(
    ops: Glm5Operations, ranks: Collective, x: Tensor, choice: Tensor, fc1: Weights, fc2: Weights
) -> Tensor:
    """rows (T, k, H), as `Glm5Operations.run_experts` gives them, by experts of all ranks. Every rank must call it.

    Args:
        ops: the operations.
        ranks: who holds which expert.
        x: (T, H) of this rank's tokens.
        choice: int64 (T, k) among all experts.
        fc1: for each of this rank's experts [gate | up] (2F, H).
        fc2: for each of this rank's experts (H, F).

    Raises:
        ContractViolation: the ranks disagree about who holds which expert.
    """
    masters = [weight for weight in (*fc1, *fc2) if not isinstance(weight, BlockWeight)]
    if not needs_gradient(x, *masters):
        return _forward(ops, ranks, x, choice, fc1, fc2)[0]
    return record(_OverRanks, ops, ranks, x, choice, *masters)


def share(ranks: Collective, weights: Sequence[Tensor]) -> list[Tensor]:
    """This rank's part of the weights of all experts."""
    return [weights[expert] for expert in ranks.held]
