"""Lantern's modules in Megatron: a layer with two more norms, an output layer with capped logits."""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules
from torch import Tensor

from vime_core.numerics import Operations
from vime_lantern.megatron import AFTER
from vime_megatron.aligned.layer import AlignedLayer
from vime_megatron.aligned.modules import AlignedColumnLinear, AlignedRmsNorm, adopt
from vime_megatron.aligned.sequences import AlignedSequences, LayerTaps


class LanternLayer(AlignedLayer):
    """One layer. Taps bear the names that the engine's layer gives them."""

    def __init__(
        self, config: TransformerConfig, submodules: TransformerLayerSubmodules, *, operations: Operations, **given: Any
    ) -> None:
        super().__init__(config, submodules, operations=operations, **given)
        norm = partial(AlignedRmsNorm, config, config.hidden_size, config.layernorm_epsilon, operations=operations)
        for name in AFTER:
            setattr(self, name, norm())

    def forward(self, hidden_states: Tensor, *, packed_seq_params: AlignedSequences, **_: Any) -> tuple[Tensor, None]:
        """The residual stream [T, H] to the next layer's, and no context."""
        taps = LayerTaps(self.layer_number - 1, packed_seq_params.positions)
        normed = self.input_layernorm(hidden_states)
        taps("input_norm", normed)
        attended, _ = self.self_attention(normed, attention_mask=None, packed_seq_params=packed_seq_params)
        taps("attention_output", attended)
        normed, stream = self.pre_mlp_layernorm(self.after_attention_norm(attended), hidden_states)
        taps("attention_residual", stream)
        taps("post_attention_norm", normed)
        output = self.operations.residual_sum(self.after_mlp_norm(self.mlp(normed, taps)), stream)
        taps("hidden_state", output)
        return output, None


class CappedOutput(AlignedColumnLinear):
    """The output layer, its logits soft-capped."""

    cap: float

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """See `AlignedColumnLinear.forward`."""
        logits, _ = super().forward(input_, weight, runtime_gather_output)
        return self.operations.soft_cap(logits, self.cap), None


def capped_output(module: Any, operations: Operations, cap: float) -> CappedOutput:
    """Turn the output layer that GPTModel made into one that caps."""
    adopted = adopt(module, CappedOutput, operations)
    adopted.cap = cap
    return adopted
