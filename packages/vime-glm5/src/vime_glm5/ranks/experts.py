"""The experts of a layer (:mod:`vime_glm5.numerics.experts`) by experts of all ranks.

No sum is taken on the way: the owner of a token reduces, in slot order (:mod:`vime_glm5.numerics.combine`). Experts are
row-invariant, so the forward has the bits of one rank.

Gradient: the rows' gradients go the same way; a weight's gradient is over the rows of all ranks, lower ranks first.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vime_core.numerics.gradients import needs_gradient, record
from vime_glm5.numerics import BlockWeight, Glm5Operations
from vime_glm5.numerics.experts import Weights, expert_gradients, over_slots, routes_of, run_experts
from vime_glm5.ranks.types import Arrivals, Ranks


def _forward(
    ops: Glm5Operations, ranks: Ranks, x: Tensor, choice: Tensor, weights: Tensor, fc1: Weights, fc2: Weights
) -> tuple[Tensor, Arrivals, Tensor]:
    """(rows (T, k, H), the routes, what came here (n, H))."""
    here, arrivals = ranks.dispatch(x, choice, weights)
    with torch.no_grad():
        rows = run_experts(ops, here, arrivals.experts.unsqueeze(1), fc1, fc2).squeeze(1)
    return ranks.give_back(arrivals, rows).unflatten(0, (-1, choice.shape[1])), arrivals, here


class _OverRanks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ops: Glm5Operations, ranks: Ranks, x: Tensor, choice: Tensor, weights: Tensor, *masters: Tensor
    ) -> Tensor:
        half = len(masters) // 2
        rows, ctx.arrivals, here = _forward(ops, ranks, x, choice, weights, masters[:half], masters[half:])
        ctx.ops, ctx.ranks = ops, ranks
        ctx.save_for_backward(here, *masters)
        return rows

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        here, *masters = ctx.saved_tensors
        half, arrivals = len(masters) // 2, ctx.arrivals
        grad = ctx.ranks.send(arrivals, grads[0].flatten(0, 1))
        dx, found = torch.zeros_like(here), [torch.zeros_like(master) for master in masters]
        for expert in range(half):
            mine, _ = routes_of(arrivals.experts.unsqueeze(1), expert)
            if len(mine):
                parts = expert_gradients(ctx.ops, grad[mine], here[mine], masters[expert], masters[half + expert])
                dx[mine], found[expert], found[half + expert] = parts
        rows = ctx.ranks.give_back(arrivals, dx).unflatten(0, grads[0].shape[:2])
        return None, None, over_slots(rows), None, None, *found


def run_experts_over_ranks(
    ops: Glm5Operations, ranks: Ranks, x: Tensor, choice: Tensor, weights: Tensor, fc1: Weights, fc2: Weights
) -> Tensor:
    """rows (T, k, H), as `Glm5Operations.run_experts` gives them, by experts of all ranks. Every rank must call it.

    Args:
        ops: the operations.
        ranks: who holds which expert.
        x: (T, H) of this rank's tokens.
        choice: int64 (T, k) among all experts.
        weights: fp32 (T, k) of the routes; they check what arrives and change no row.
        fc1: for each of this rank's experts [gate | up] (2F, H).
        fc2: for each of this rank's experts (H, F).

    Raises:
        ContractViolation: what arrived is not what was sent.
    """
    masters = [weight for weight in (*fc1, *fc2) if not isinstance(weight, BlockWeight)]
    if not needs_gradient(x, *masters):
        return _forward(ops, ranks, x, choice, weights, fc1, fc2)[0]
    return record(_OverRanks, ops, ranks, x, choice, weights.detach(), *masters)


def share(ranks: Ranks, weights: Sequence[Tensor]) -> list[Tensor]:
    """This rank's part of the weights of all experts."""
    return [weights[expert] for expert in ranks.held]
