"""Megatron's MLP slot of a sparse layer: router, routed experts, shared expert, combine."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from vime_glm5.megatron.modules import Mlp, Weight, parameter
from vime_glm5.numerics import Glm5Operations
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


class Expert(torch.nn.Module):
    """The two matrices of one routed expert."""

    def __init__(self, config: TransformerConfig, shape: Glm5Shape) -> None:
        super().__init__()
        self.linear_fc1 = Weight(config, 2 * shape.expert_intermediate, shape.hidden)
        self.linear_fc2 = Weight(config, shape.hidden, shape.expert_intermediate)


class Experts(torch.nn.Module):
    """All routed experts of a layer, on this rank."""

    def __init__(self, config: TransformerConfig, *, operations: Glm5Operations, shape: Glm5Shape) -> None:
        super().__init__()
        self.operations = operations
        self.local_experts = torch.nn.ModuleList(Expert(config, shape) for _ in range(shape.experts))

    def forward(self, x: Tensor, choice: Tensor) -> Tensor:
        """[T, k, H], a row for each route, of x [T, H] and the experts [T, k]."""
        held: list[Any] = list(self.local_experts)
        first, second = ([getattr(e, name).weight for e in held] for name in ("linear_fc1", "linear_fc2"))
        return self.operations.run_experts(x, choice, first, second)


class SparseMlp(torch.nn.Module):
    """The MoE block of an aligned layer."""

    def __init__(self, config: TransformerConfig, *, operations: Glm5Operations, shape: Glm5Shape, **_: Any) -> None:
        super().__init__()
        self.operations, self.factor = operations, shape.factor
        self.router = Router(config, operations=operations, shape=shape)
        self.experts = Experts(config, operations=operations, shape=shape)
        self.shared_experts = Mlp(config, shape.expert_intermediate, operations=operations)

    def forward(self, hidden_states: Tensor, taps: LayerTaps) -> Tensor:
        """[T, 1, H] to [T, 1, H]."""
        x = hidden_states.squeeze(1)
        choice, weights = self.router(x)
        taps("router_slots", choice)
        taps("router_weights", weights)
        rows = self.experts(x, choice)
        taps("expert_rows", rows)
        shared = self.shared_experts.run(x, taps)
        taps("shared_expert", shared)
        output = self.operations.combine(rows, weights, shared, self.factor)
        taps("mlp_output", output)
        return output.unsqueeze(1)
