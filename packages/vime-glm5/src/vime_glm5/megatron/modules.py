"""Weights of GLM-5 in Megatron's model, and the operations that read them."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from vime_core.errors import PolicyError
from vime_glm5.numerics import Glm5Operations
from vime_megatron.aligned.sequences import LayerTaps

Tap = Callable[[str, Tensor], None]


def parameter(*shape: int, dtype: torch.dtype, trained: bool = True) -> torch.nn.Parameter:
    """A parameter that the model's weights are loaded into."""
    return torch.nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=trained)


class Weight(torch.nn.Module):
    """A matrix [N, K] under Megatron's name ``....weight``, and a bias [N] where there is one."""

    def __init__(
        self, config: TransformerConfig, n: int, k: int = 0, *, trained: bool = True, bias: bool = False
    ) -> None:
        super().__init__()
        dtype = config.params_dtype
        self.weight = parameter(*((n, k) if k else (n,)), dtype=dtype, trained=trained)
        self.bias = parameter(n, dtype=dtype, trained=trained) if bias else None


class BlockLinear(Weight):
    """y = operations.block_linear(x, weight), quantised from the master in every forward.

    ``parts``: how many projections the weight stacks.
    """

    def __init__(
        self,
        config: TransformerConfig,
        n: int,
        k: int,
        *,
        operations: Glm5Operations,
        trained: bool = True,
        parts: int = 1,
    ) -> None:
        super().__init__(config, n, k, trained=trained)
        self.operations, self.parts = operations, parts

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] to [..., N]."""
        return self.operations.block_linear(x, self.weight, self.parts)


class Linear(Weight):
    """y = operations.linear(x, weight), in bf16."""

    def __init__(
        self, config: TransformerConfig, n: int, k: int, *, operations: Glm5Operations, trained: bool = True
    ) -> None:
        super().__init__(config, n, k, trained=trained)
        self.operations = operations

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] to [..., N]."""
        return self.operations.linear(x, self.weight)


class Mlp(torch.nn.Module):
    """A SwiGLU MLP of block-FP8 linears: that of a dense layer, and the shared expert."""

    def __init__(self, config: TransformerConfig, intermediate: int, *, operations: Glm5Operations) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.operations = operations
        self.linear_fc1 = BlockLinear(config, 2 * intermediate, hidden, operations=operations, parts=2)
        self.linear_fc2 = BlockLinear(config, hidden, intermediate, operations=operations)

    def run(self, x: Tensor, tap: Tap) -> Tensor:
        """[T, H] to [T, H]."""
        gate_up = self.linear_fc1(x)
        tap("gate_up", gate_up)
        activated = self.operations.swiglu(gate_up)
        tap("swiglu", activated)
        return self.linear_fc2(activated)


class DenseMlp(Mlp):
    """The MLP of a dense layer in the slot of an aligned layer."""

    def forward(self, hidden_states: Tensor, taps: LayerTaps) -> Tensor:
        """[T, H] to [T, H]."""
        output = self.run(hidden_states, taps)
        taps("mlp_output", output)
        return output


def require_bf16(config: TransformerConfig, contract: str) -> None:
    """Raise PolicyError unless the model trains in bf16, the dtype of the contract's masters and cache."""
    if config.params_dtype != torch.bfloat16:
        name = str(config.params_dtype).removeprefix("torch.")
        raise PolicyError(
            f"contract {contract} is kept in bfloat16; the model is built in {name}",
            remedy="Set trainer.dtype = 'bf16'.",
            code="VIME-ALIGN-072",
        )
