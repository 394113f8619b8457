"""One decoder layer, pre-normed: attention and SwiGLU around the rounded residual stream."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from vime_core.numerics import Operations
from vime_megatron.aligned.modules import AlignedColumnLinear, AlignedRowLinear
from vime_megatron.aligned.sequences import AlignedSequences, LayerTaps
from vime_megatron.specs import with_bias


class AlignedMlp(MLP):
    """Megatron's MLP with the operations' SwiGLU between its linears."""

    linear_fc1: Any  # Megatron's own types do not say that modules are called
    linear_fc2: Any

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        *,
        operations: Operations,
        bias: bool = False,
        **_: Any,
    ) -> None:
        kinds = (AlignedColumnLinear, AlignedRowLinear)
        linears: Any = [partial(with_bias, kind, bias, operations=operations) for kind in kinds]
        super().__init__(
            config, MLPSubmodules(*linears), ffn_hidden_size=config.ffn_hidden_size, tp_group=pg_collection.tp
        )
        self.operations = operations

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride] (its caller is an aligned layer)
        self, hidden_states: Tensor, taps: LayerTaps
    ) -> Tensor:
        """[T, H] to [T, H]."""
        gate_up, _ = self.linear_fc1(hidden_states)
        taps("gate_up", gate_up)
        activated = self.operations.swiglu(gate_up)
        taps("swiglu", activated)
        output: Tensor = self.linear_fc2(activated)[0]
        taps("mlp_output", output)
        return output


class AlignedLayer(TransformerLayer):
    """Megatron's layer as far as its parts go; what passes between them is written here.

    Megatron's own forward has places for biases, dropout, fused kernels and offloading; this one has none of them.
    """

    input_layernorm: Any
    self_attention: Any
    pre_mlp_layernorm: Any
    mlp: Any

    def __init__(
        self, config: TransformerConfig, submodules: TransformerLayerSubmodules, *, operations: Operations, **given: Any
    ) -> None:
        super().__init__(config, submodules, **given)
        self.operations = operations

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride] (the rest of Megatron's arguments is unused)
        self, hidden_states: Tensor, *, packed_seq_params: AlignedSequences, **_: Any
    ) -> tuple[Tensor, None]:
        """The residual stream [T, H] to the next layer's, and no context."""
        taps = LayerTaps(self.layer_number - 1, packed_seq_params.positions)
        normed = self.input_layernorm(hidden_states)
        taps("input_norm", normed)
        attended, _ = self.self_attention(normed, attention_mask=None, packed_seq_params=packed_seq_params)
        taps("attention_output", attended)
        normed, stream = self.pre_mlp_layernorm(attended, hidden_states)
        taps("attention_residual", stream)
        taps("post_attention_norm", normed)
        output = self.operations.residual_sum(self.mlp(normed, taps), stream)
        taps("hidden_state", output)
        return output, None
