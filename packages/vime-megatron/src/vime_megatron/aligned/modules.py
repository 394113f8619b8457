"""Megatron's slots filled with the operations: linears, embedding, norm.

Each module is Megatron's own as far as parameters, checkpoints and initialisation go; its forward is one operation.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import Any, TypeVar

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from vime_core.numerics import Operations

Adopted = TypeVar("Adopted", bound=torch.nn.Module)


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
        own: Any = self.weight  # absent where the embedding's is shared
        return self.operations.linear(input_, own if weight is None else weight, self.bias), None


class AlignedRowLinear(RowParallelLinear):
    """``RowParallelLinear`` of one rank: y = operations.linear(x, weight, bias)."""

    def __init__(self, *sizes: int, operations: Operations, **given: Any) -> None:
        super().__init__(*sizes, **given)
        self.operations = operations

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride] (Megatron's type denies what it returns)
        self, input_: Tensor
    ) -> tuple[Tensor, None]:
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


def adopt(module: torch.nn.Module, kind: type[Adopted], operations: Operations) -> Adopted:
    """Turn a module whose class GPTModel fixes (embedding, output layer) into an aligned one, in place.

    Args:
        module: of a base class of ``kind``; its parameters stay where they are.
        kind: has the attribute ``operations`` and nothing else that its constructor would have set.
        operations: of the contract.
    """
    assert issubclass(kind, type(module))
    module.__class__ = kind
    adopted: Any = module
    adopted.operations = operations
    return adopted
