"""The provider ``deep_ep``: DeepEP's normal kernels (deep_ep 1.2), which move tokens, brought to move routes.

1. *Dispatch*: hidden states, each once to every rank that holds one of its experts.
2. *Second dispatch*: the routes as tokens of their own, one target each, with a payload of `PAYLOAD` bytes: expert,
   bits of the weight, token, slot. It gives the handle by which rows of single routes travel.
3. *Check*: the n-th (row, local expert) pair of the first dispatch is the n-th route of the second, because both keep
   the order of tokens and slots of each owner. Expert, weight, token and slot of every pair must agree, bit for bit.
4. *Combine* by the route handle. A route has one target, so the sum that the kernel takes has one term: a move. (That
   sum begins at +0, so a row's -0 comes back as +0, which neither the owner's sum nor a gradient's can tell.)

The class needs no device: it is tested over gloo with a buffer of the same meaning. With deep_ep itself it has not run.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from vime_core.errors import ContractViolation
from vime_glm5.ranks.types import Arrivals, held_by

PAYLOAD: Final = 32
"""Bytes; the least that the kernels move."""
Layout = tuple[Tensor, Tensor | None, Tensor, Tensor, Any]


class Buffer(Protocol):
    """What is used of ``deep_ep.Buffer``; argument names and shapes are deep_ep's."""

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> Layout:
        """(tokens for each rank, for each RDMA rank or None, for each expert, is_token_in_rank (T, R), event)."""
        ...

    def dispatch(
        self,
        x: Tensor,
        handle: Any = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
    ) -> tuple[Any, Tensor | None, Tensor | None, list[int] | None, Any, Any]:
        """(rows that came here, local experts or -1, their weights, counts, handle, event); rows alone by a handle."""
        ...

    def combine(self, x: Tensor, handle: Any) -> tuple[Tensor, Tensor | None, Any]:
        """(sum over ranks at each token's owner, weights, event)."""
        ...


@dataclass(frozen=True)
class DeepEp:
    """See `vime_glm5.ranks.types.Ranks`.

    Args:
        group: of the ranks.
        experts: E of the layer, a multiple of the ranks.
        buffer: DeepEP's, over ``group``, for rows of any width that is sent.
    """

    group: dist.ProcessGroup
    experts: int
    buffer: Buffer

    def __post_init__(self) -> None:
        held_by(0, dist.get_world_size(self.group), self.experts)

    @property
    def held(self) -> range:
        return held_by(dist.get_rank(self.group), dist.get_world_size(self.group), self.experts)

    def dispatch(self, x: Tensor, choice: Tensor, weights: Tensor) -> tuple[Tensor, Arrivals]:
        tokens, local, scores, _ = self._send_new(x, choice, weights)
        routes = choice.reshape(-1, 1)
        payload, alone, bits, handle = self._send_new(
            payload_of(choice, weights), routes, weights.reshape(-1, 1).contiguous()
        )
        row, slot = torch.where(local >= 0)
        experts = local[row, slot]
        self._check(payload, alone, bits, experts, scores[row, slot], slot)
        return tokens[row], Arrivals(experts, handle)

    def send(self, arrivals: Arrivals, rows: Tensor) -> Tensor:
        return self.buffer.dispatch(rows.contiguous(), handle=arrivals.way)[0]

    def give_back(self, arrivals: Arrivals, rows: Tensor) -> Tensor:
        return self.buffer.combine(rows.contiguous(), handle=arrivals.way)[0]

    def _send_new(self, rows: Tensor, choice: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor, Any]:
        """(rows that came, local experts or -1, weights, handle)."""
        per_rank, per_rdma_rank, per_expert, in_rank, _ = self.buffer.get_dispatch_layout(choice, self.experts)
        came, local, scores, _, handle, _ = self.buffer.dispatch(
            rows.contiguous(),
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=choice.contiguous(),
            topk_weights=weights.contiguous(),
        )
        assert local is not None
        assert scores is not None
        return came, local, scores, handle

    def _check(
        self, payload: Tensor, alone: Tensor, bits: Tensor, experts: Tensor, weights: Tensor, slot: Tensor
    ) -> None:
        """The routes of the second dispatch are those of the first, in its order.

        Args:
            payload: bf16 (n, 16), as `payload_of` made it.
            alone: int64 (n, 1), the second dispatch's local expert; its ``bits`` fp32 (n, 1) the weight.
            experts: int64 (n), the first dispatch's local experts; ``weights`` fp32 (n), ``slot`` int64 (n).
        """
        if len(payload) != len(experts):
            raise _disagree(f"{len(experts)} routes by hidden states, {len(payload)} by route")
        said = payload.contiguous().view(torch.int32)
        pairs = {
            "expert": (said[:, 0], experts + self.held.start),
            "local expert": (alone[:, 0], experts),
            "weight": (said[:, 1], weights.contiguous().view(torch.int32)),
            "weight beside the payload": (bits[:, 0].contiguous().view(torch.int32), said[:, 1]),
            "slot": (said[:, 3], slot),
        }
        for what, (one, other) in pairs.items():
            if int((wrong := one.long() != other.long()).sum()):
                first = int(wrong.nonzero()[0])
                raise _disagree(
                    f"{what} of route {first} of {len(said)}: {int(one[first])} against {int(other[first])}"
                )
        self._check_order(said[:, 2].long(), slot)

    def _check_order(self, token: Tensor, slot: Tensor) -> None:
        """Within an owner (tokens, slots) ascend; they begin anew at most once for each rank."""
        place = token * (int(slot.max()) + 1 if len(slot) else 1) + slot
        falls = int((place[1:] <= place[:-1]).sum())
        if falls >= dist.get_world_size(self.group):
            raise _disagree(f"tokens and slots of the routes fall back {falls} times")


def payload_of(choice: Tensor, weights: Tensor) -> Tensor:
    """bf16 (T k, 16), 32 bytes a route: expert, bits of the weight, token and slot as int32, and zeros."""
    slots = choice.shape[1]
    place = torch.arange(choice.numel(), device=choice.device)
    columns = [choice.flatten(), weights.contiguous().view(torch.int32).flatten(), place // slots, place % slots]
    filled = torch.zeros(choice.numel(), PAYLOAD // 4, dtype=torch.int32, device=choice.device)
    filled[:, :4] = torch.stack([column.to(torch.int32) for column in columns], 1)
    return filled.view(torch.bfloat16)


def open_buffer(group: dist.ProcessGroup, hidden: int) -> Buffer:
    """DeepEP's buffer for bf16 rows of ``hidden`` elements, as large as its dispatch and combine ask for."""
    kind: Any = import_module("deep_ep").Buffer
    size, row = dist.get_world_size(group), max(2 * hidden, PAYLOAD)
    configs = [kind.get_dispatch_config(size), kind.get_combine_config(size)]
    nvlink = max(config.get_nvl_buffer_size_hint(row, size) for config in configs)
    rdma = max(config.get_rdma_buffer_size_hint(row, size) for config in configs)
    return kind(group, nvlink, rdma)


def _disagree(what: str) -> ContractViolation:
    return ContractViolation(
        f"the two dispatches of DeepEP brought different routes: {what}",
        remedy="Use the provider 'collective', and report deep_ep's version.",
        code="VIME-ALIGN-077",
    )
