"""Megatron's MLP slot of a sparse layer: router, routed experts, shared expert, combine."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from vime_glm5.megatron.modules import Mlp, Weight, parameter
from vime_glm5.numerics import Glm5Operations
from vime_glm5.ranks.experts import run_experts_over_ranks
from vime_glm5.ranks.types import Ranks
from vime_glm5.structure import Glm5Shape
from vime_megatron.aligned.sequences import LayerTaps
from vime_megatron.model import KEEPS_DTYPE


class Router(Weight):
    """The gate in the training dtype; the bias, which only chooses, in fp32 and not trained."""

    def __init__(self, config: TransformerConfig, *, operations: Glm5Operations, shape: Glm5Shape) -> None:
        super().__init__(config, shape.experts, shape.hidden)
        self.operations, self.slots = operations, shape.experts_per_token
        self.expert_bias = parameter(shape.experts, dtype=torch.float32, trained=False)
        setattr(self.expert_bias, KEEPS_DTYPE, True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(experts int64 [T, k], weights fp32 [T, k]) of x [T, H]."""
        return self.operations.route(x, self.weight, self.expert_bias, self.slots)


class ExpertWeights(torch.nn.Module):
    """One matrix [N, K] of each expert that this rank holds: [E / R, N, K] under Megatron's name ``....weight``."""

    def __init__(self, config: TransformerConfig, held: int, n: int, k: int, *, spread: bool) -> None:
        super().__init__()
        self.weight = parameter(held, n, k, dtype=config.params_dtype)
        setattr(self.weight, "allreduce", not spread)  # noqa: B010 (Megatron's name for what is of this rank alone)


class Experts(torch.nn.Module):
    """The routed experts of a layer: all of them, or this rank's of those that are spread over ranks."""

    def __init__(
        self, config: TransformerConfig, *, operations: Glm5Operations, shape: Glm5Shape, ranks: Ranks | None
    ) -> None:
        super().__init__()
        self.operations, self.ranks = operations, ranks
        held = shape.experts if ranks is None else len(ranks.held)
        spread, hidden, inner = ranks is not None, shape.hidden, shape.expert_intermediate
        self.linear_fc1 = ExpertWeights(config, held, 2 * inner, hidden, spread=spread)
        self.linear_fc2 = ExpertWeights(config, held, hidden, inner, spread=spread)

    def forward(self, x: Tensor, choice: Tensor, weights: Tensor) -> Tensor:
        """[T, k, H], a row for each route, of x [T, H], the experts [T, k] and the routes' weights fp32 [T, k]."""
        first, second = self.linear_fc1.weight.unbind(0), self.linear_fc2.weight.unbind(0)
        if self.ranks is None:
            return self.operations.run_experts(x, choice, first, second)
        return run_experts_over_ranks(self.operations, self.ranks, x, choice, weights, first, second)


class SparseMlp(torch.nn.Module):
    """The MoE block of an aligned layer."""

    def __init__(
        self,
        config: TransformerConfig,
        *,
        operations: Glm5Operations,
        shape: Glm5Shape,
        ranks: Ranks | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.operations, self.factor = operations, shape.factor
        self.router = Router(config, operations=operations, shape=shape)
        self.experts = Experts(config, operations=operations, shape=shape, ranks=ranks)
        self.shared_experts = Mlp(config, shape.expert_intermediate, operations=operations)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """What Megatron's checkpoints ask of a module: whole tensors, and each rank's experts as a part of all."""
        del metadata
        tensors = self.state_dict(prefix="", keep_vars=True)
        groups: dict[str, Any] = {
            "tp_group": parallel_state.get_tensor_model_parallel_group(),
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        }
        held = make_sharded_tensors_for_checkpoint(tensors, prefix, {}, sharded_offsets, **groups)
        spread = {} if self.experts.ranks is None else {f"experts.{n}": p for n, p in self.experts.named_parameters()}
        for name, weight in spread.items():
            held[f"{prefix}{name}"] = _part_of_all(f"{prefix}{name}", weight, sharded_offsets)
        return held

    def forward(self, x: Tensor, taps: LayerTaps) -> Tensor:
        """[T, H] to [T, H]."""
        choice, weights = self.router(x)
        taps("router_slots", choice)
        taps("router_weights", weights)
        rows = self.experts(x, choice, weights)
        taps("expert_rows", rows)
        shared = self.shared_experts.run(x, taps)
        taps("shared_expert", shared)
        output = self.operations.combine(rows, weights, shared, self.factor)
        taps("mlp_output", output)
        return output


def _part_of_all(key: str, weight: Tensor, offsets: Any) -> ShardedTensor:
    """This rank's experts of a parameter [E, N, K]; ranks with the same experts are replicas."""
    part = parallel_state.get_expert_model_parallel_rank(), parallel_state.get_expert_model_parallel_world_size()
    replica = (0, 0, parallel_state.get_expert_data_parallel_rank())
    return ShardedTensor.from_rank_offsets(
        key, weight, *offsets, (len(offsets), *part), replica_id=replica, prepend_axis_num=len(offsets)
    )
