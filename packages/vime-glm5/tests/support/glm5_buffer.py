"""What DeepEP's normal kernels do with rows, over gloo: order, local experts, sums. And what goes wrong with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass
class GlooBuffer:
    """As `vime_glm5.ranks.deep_ep.Buffer` says. ``fault`` names what it does wrong to what arrives by route."""

    group: dist.ProcessGroup
    fault: str = ""

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> Any:
        assert topk_idx.dtype == torch.int64
        size = dist.get_world_size(self.group)
        self.each = num_experts // size
        in_rank = torch.stack([(topk_idx // self.each == rank).any(1) for rank in range(size)], 1)
        per_expert = torch.bincount(topk_idx.flatten(), minlength=num_experts).int()
        return in_rank.sum(0).int(), None, per_expert, in_rank, None

    def dispatch(self, x: Tensor, handle: Any = None, **given: Any) -> Any:
        assert x.dtype == torch.bfloat16
        assert x.shape[1] * 2 % 32 == 0
        if handle is not None:
            return self._exchange(x[handle[0]], *handle[1:]), None, None, None, handle, None
        in_rank, rank = given["is_token_in_rank"], dist.get_rank(self.group)
        order = torch.cat([column.nonzero().flatten() for column in in_rank.unbind(1)])
        sent = in_rank.sum(0)
        assert sent.int().equal(given["num_tokens_per_rank"])
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        handle = (order, sent.tolist(), received.tolist())
        rows, experts, weights = (
            self._exchange(t[order], *handle[1:]) for t in (x, given["topk_idx"], given["topk_weights"])
        )
        mine = experts // self.each == rank
        local, scores = torch.where(mine, experts % self.each, -1), torch.where(mine, weights, 0.0)
        if x.shape[1] == 16:
            rows, local, scores = self._spoil(rows, local, scores)
        return rows, local, scores, [], handle, None

    def combine(self, x: Tensor, handle: Any) -> Any:
        order, sent, received = handle
        back = self._exchange(x, received, sent)
        total = torch.zeros(int(order.max()) + 1 if len(order) else 0, x.shape[1])
        return total.index_add(0, order, back.float()).bfloat16(), None, None

    def _exchange(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        packed = rows.contiguous().view(torch.uint8)
        result = packed.new_empty(sum(received), packed.shape[1])
        dist.all_to_all_single(result, packed, received, sent, group=self.group)
        return result.view(rows.dtype)

    def _spoil(self, rows: Tensor, local: Tensor, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        words = rows.view(torch.int32).clone()
        if self.fault == "an order of its own":
            back = torch.arange(len(rows)).flip(0)
            return rows[back], local[back], scores[back]
        if self.fault == "a route lost":
            return rows[1:], local[1:], scores[1:]
        if self.fault == "one bit of a weight":
            words[2, 1] ^= 1
        if self.fault == "another expert":
            words[2, 0] += 1
        if self.fault == "another slot":
            words[2, 3] += 1
        return words.view(torch.bfloat16), local, scores
