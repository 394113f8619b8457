"""Megatron's slots filled with the operations: linears, embedding, norm.

Each module is Megatron's own as far as parameters, checkpoints and initialisation go; its forward is one operation.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from vime_core.numerics import Operations


class AlignedColumnLinear(ColumnParallelLinear):
    """``ColumnParallelLinear`` of one rank: y = operations.linear(x, weight, bias)."""

    def __init__(self, *sizes: int, operations: Operations, **given: Any) -> None:
        super().__init__(*sizes, **given)
        self.operations = operations

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """[..., K] to ([..., N], no bias left to add); ``weight`` [N, K] stands in for the module's own."""
        del runtime_gather_output  # one rank has nothing to gather
        return self.operations.linear(input_, self.weight if weight is None else weight, self.bias), None


class AlignedRowLinear(RowParallelLinear):
    """``RowParallelLinear`` of one rank: y = operations.linear(x, weight, bias)."""

    def __init__(self, *sizes: int, operations: Operations, **given: Any) -> None:
        super().__init__(*sizes, **given)
        self.operations = operations

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        """[..., K] to ([..., N], no bias left to add)."""
        return self.operations.linear(input_, self.weight, self.bias), None


class AlignedEmbedding(VocabParallelEmbedding):
    """``VocabParallelEmbedding`` of one rank: a gather, with the operation's gradient."""

    operations: Operations

    def forward(self, input_: Tensor) -> Tensor:
        """int64 [T] to [T, hidden]."""
        return self.operations.embedding(input_, self.weight)


class AlignedRmsNorm(torch.nn.Module):
    """RMSNorm over the last dimension, alone or behind a residual sum."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, *, operations: Operations) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.eps = eps
        self.operations = operations

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] to its norm, in the same dtype."""
        return self.operations.rms_norm(x, self.weight, self.eps)


class AlignedAddRmsNorm(AlignedRmsNorm):
    """Residual sum and RMSNorm of the rounded sum."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride] (a second input, a second output)
        self, x: Tensor, residual: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(norm, x + residual), both [..., H] in the same dtype."""
        return self.operations.add_rms_norm(x, residual, self.weight, self.eps)


def residual_sum(operations: Operations, x: Tensor, residual: Tensor) -> Tensor:
    """The residual stream [..., H] as `Operations.add_rms_norm` rounds it; its norm is dropped."""
    unused = torch.ones(x.shape[-1], dtype=x.dtype, device=x.device)
    return operations.add_rms_norm(x, residual, unused, 1.0)[1]


def adopt_output_layer(module: ColumnParallelLinear, operations: Operations) -> AlignedColumnLinear:
    """Turn the output layer, whose class GPTModel fixes, into an aligned one; its weight stays where it is."""
    module.__class__ = AlignedColumnLinear
    assert isinstance(module, AlignedColumnLinear)
    module.operations = operations
    return module


def adopt_embedding(module: VocabParallelEmbedding, operations: Operations) -> AlignedEmbedding:
    """Turn the embedding, whose class GPTModel fixes, into an aligned one; its weight stays where it is."""
    module.__class__ = AlignedEmbedding
    assert isinstance(module, AlignedEmbedding)
    module.operations = operations
    return module
