"""A module that no contract knows."""

from __future__ import annotations

from torch import Tensor, nn


class Activation(nn.Module):
    """SwiGLU as stock torch computes it."""

    def forward(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return nn.functional.silu(gate) * up
