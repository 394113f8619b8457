"""A step's microbatches shared by data parallel ranks, and what they computed brought together in one order.

Microbatch i belongs to rank i modulo ranks. Losses, metrics and log-probs come back by microbatch, as if one rank had
computed all; gradients are added in fp32 from rank 0 upwards, on every rank, so that neither the collectives' algorithm
nor the ranks' places decide a bit.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

_T = TypeVar("_T")
CHUNK_ELEMENTS: Final = 1 << 26
"""Elements that are added at a time; chunks change no bit."""


def data_parallel_size() -> int:
    """Ranks that share a step's microbatches."""
    return parallel_state.get_data_parallel_world_size()


def own_share(microbatches: int) -> range:
    """The numbers of this rank's microbatches."""
    return range(parallel_state.get_data_parallel_rank(), microbatches, data_parallel_size())


def companion(microbatches: int) -> int | None:
    """The microbatch that this rank computes once more, for nothing, when the others have one more than it has.

    Experts that are spread over ranks are asked by all of them at once, so all must compute equally many.
    """
    size = data_parallel_size()
    idle = microbatches % size and parallel_state.get_data_parallel_rank() >= microbatches % size
    spread = parallel_state.get_expert_model_parallel_world_size() > 1
    return microbatches - 1 if idle and spread else None


def by_microbatch(own: Sequence[_T]) -> list[_T]:
    """What all ranks have of their microbatches, in the order of all microbatches. A collective."""
    size = data_parallel_size()
    if size == 1:
        return list(own)
    shares: list[Any] = [None] * size
    dist.all_gather_object(shares, list(own), group=parallel_state.get_data_parallel_group())
    return [shares[i % size][i // size] for i in range(sum(map(len, shares)))]


def add_over_ranks(flat: Tensor, group: Any) -> None:
    """Replace a contiguous tensor by the sum over a group's ranks: ((rank 0 + rank 1) + rank 2) + ..., on each."""
    ranks = dist.get_process_group_ranks(group)
    for part in flat.view(-1).split(CHUNK_ELEMENTS):
        total: Tensor | None = None
        for rank in ranks:
            theirs = part.clone() if rank == dist.get_rank() else torch.empty_like(part)
            dist.broadcast(theirs, src=rank, group=group)
            total = theirs if total is None else total.add_(theirs)
        assert total is not None
        part.copy_(total)


def join_ranges(numel: int, own: slice, values: Tensor | None, device: torch.device, group: Any) -> Tensor:
    """An fp32 vector [numel] of which each rank of ``group`` holds the elements ``own``; bits stay. A collective."""
    joined = torch.zeros(numel, dtype=torch.float32, device=device)
    if values is not None:
        joined[own] = values.detach().view(-1)
    # As integers, all but one of them zero, so that the sum has the bits of the one.
    dist.all_reduce(joined.view(torch.int32), group=group)
    return joined
