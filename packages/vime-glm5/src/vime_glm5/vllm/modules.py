"""Modules of the engine's GLM-5 that hold masters, and beside them what is derived from these once a version."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from vime_glm5.numerics import AbsorbedWeights, BlockWeight, Glm5Operations
from vime_vllm.aligned.modules import Linear, weight


@runtime_checkable
class Derives(Protocol):
    """A module whose operations read tensors that are derived from its parameters."""

    def derive(self) -> None:
        """Make them anew from the present parameters."""
        ...

    def derived(self) -> Mapping[str, Tensor]:
        """Those that operations read now, by a name within the module."""
        ...

    def fresh(self) -> Mapping[str, Tensor]:
        """Those that the present parameters give, under the same names."""
        ...


class BlockLinear(Linear):
    """y = operations.block_linear of the quantised copy of the master weight."""

    held: BlockWeight
    operations: Glm5Operations

    def derive(self) -> None:
        self.held = self._make()

    def derived(self) -> Mapping[str, Tensor]:
        return _fields(self.held)

    def fresh(self) -> Mapping[str, Tensor]:
        return _fields(self._make())

    def forward(self, x: Tensor) -> Tensor:
        return self.operations.block_linear(x, self.held)

    def _make(self) -> BlockWeight:
        return self.operations.quantise_weight(self.weight, max(1, len(self.parts)))


def _fields(held: BlockWeight) -> dict[str, Tensor]:
    return {"e4m3": held.q, "scales": held.scales}


class AbsorbedLinear(nn.Module):
    """kv_b, of which operations read two matrices a head."""

    held: AbsorbedWeights

    def __init__(self, operations: Glm5Operations, inputs: int, heads: int, nope: int, value: int) -> None:
        super().__init__()
        self.operations, self.heads, self.nope = operations, heads, nope
        self.weight = weight(heads * (nope + value), inputs)

    def derive(self) -> None:
        self.held = self._make()

    def derived(self) -> Mapping[str, Tensor]:
        return {"w_kc": self.held.keys, "w_vc": self.held.values}

    def fresh(self) -> Mapping[str, Tensor]:
        made = self._make()
        return {"w_kc": made.keys, "w_vc": made.values}

    def absorb(self, queries: Tensor) -> Tensor:
        """(T, heads, L) of queries (T, heads, nope)."""
        return self.operations.head_linear(queries, self.held.keys)

    def values(self, latents: Tensor) -> Tensor:
        """(T, heads, v) of latents (T, heads, L)."""
        return self.operations.head_linear(latents, self.held.values)

    def _make(self) -> AbsorbedWeights:
        return self.operations.absorbed_weights(self.weight, self.heads, self.nope)


def derive_all(model: nn.Module) -> None:
    """Make every derived tensor of a model anew."""
    for _, module in deriving(model):
        module.derive()


def deriving(model: Any) -> list[tuple[str, Derives]]:
    """The modules that derive tensors, by name."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, Derives)]
