"""Parameters spread over ranks: this rank's part of a whole tensor, and the whole of all parts.

Under tensor parallelism a rank holds, of each of ``stride`` equal blocks along ``dim``, the part of its number: gate
and up projection are two blocks. Under expert parallelism it holds its own experts of a parameter [E, ...] of all,
which Megatron marks by ``allreduce = False``. A parameter that is not split is whole on every rank.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from vime_core.errors import ConfigError
from vime_megatron.autograd import apply
from vime_megatron.structures.types import Blueprint


@dataclass(frozen=True)
class Split:
    """How a parameter is spread over ``size`` ranks, of which this one is number ``rank`` of ``group``."""

    dim: int = 0
    stride: int = 1
    size: int = 1
    rank: int = 0
    group: Any = None

    def part(self, whole: Tensor, rank: int) -> Tensor:
        """What ``rank`` holds of the whole tensor."""
        if self.size == 1:
            return whole
        return torch.cat(whole.chunk(self.size * self.stride, self.dim)[rank :: self.size], self.dim)

    def join(self, parts: list[Tensor]) -> Tensor:
        """The whole tensor of the parts, by rank."""
        blocks = [part.chunk(self.stride, self.dim) for part in parts]
        return torch.cat([by_rank[number] for number in range(self.stride) for by_rank in blocks], self.dim)


def split_of(parameter: Tensor) -> Split:
    """How a parameter is spread over the tensor parallel or the expert parallel ranks."""
    named: Any = parameter
    if not getattr(named, "allreduce", True):
        group: Any = parallel_state.get_expert_model_parallel_group()
        return Split(0, 1, group.size(), group.rank(), group)
    if not getattr(named, "tensor_model_parallel", False):
        return Split()
    group = parallel_state.get_tensor_model_parallel_group()
    return Split(named.partition_dim, named.partition_stride, group.size(), group.rank(), group)


def shard(parameter: Tensor, whole: Tensor) -> Tensor:
    """This rank's part of the whole value of a parameter."""
    split = split_of(parameter)
    return split.part(whole, split.rank)


def whole(parameter: Tensor, part: Tensor) -> Tensor:
    """The whole value, gradient or moment of a parameter of which each rank holds a part; a collective."""
    split = split_of(parameter)
    if split.size == 1:
        return part
    return split.join(_all_parts(part, split.group))


def whole_shape(parameter: Tensor) -> tuple[int, ...]:
    """The shape of `whole`."""
    split, shape = split_of(parameter), list(parameter.shape)
    shape[split.dim] *= split.size
    return tuple(shape)


def gather_columns(part: Tensor) -> Tensor:
    """[N, V / ranks] of each tensor parallel rank to [N, V] on all of them, with gradients; a collective."""
    if parallel_state.get_tensor_model_parallel_world_size() == 1:
        return part
    return apply(_GatherColumns, part)


class _GatherColumns(torch.autograd.Function):
    """Every rank computes the same loss from the whole, so each part's gradient is that of its own columns."""

    @staticmethod
    def forward(ctx: Any, part: Tensor) -> Tensor:
        del ctx
        return torch.cat(_all_parts(part, parallel_state.get_tensor_model_parallel_group()), -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        del ctx
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        return grads[0].chunk(ranks, -1)[parallel_state.get_tensor_model_parallel_rank()].contiguous()


def _all_parts(part: Tensor, group: Any) -> list[Tensor]:
    ranks = dist.get_world_size(group)
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(ranks)]
    dist.all_gather(parts, part.contiguous(), group=group)
    return parts


def refuse_indivisible(blueprint: Blueprint, tensor_parallel: int) -> None:
    """Raise ConfigError when a dimension that tensor parallelism splits has no equal parts."""
    shape = blueprint.transformer
    split = {name: shape[name] for name in ("num_attention_heads", "num_query_groups", "ffn_hidden_size")}
    for name, size in {**split, "vocab_size": blueprint.vocabulary}.items():
        if size % tensor_parallel:
            raise ConfigError(
                f"trainer.megatron.tensor_parallel = {tensor_parallel} does not divide the model's {name} = {size}",
                remedy="Take a divisor, or use data_parallel.",
                code="VIME-CONFIG-073",
            )
