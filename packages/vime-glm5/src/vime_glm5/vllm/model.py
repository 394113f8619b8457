"""``AlignedGlm5``: the vLLM model class of ``glm5/v1`` and ``glm5/v1-bf16kv``.

Masters are the model's parameters; FP8 copies and absorbed matrices are derived from them when a weight version is
first used, and compared with them whenever digests are asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from vime_core.alignment.taps import EMBEDDING, FINAL_NORM, layer_tap, tap
from vime_core.numerics import RopeScaling
from vime_glm5.numerics import Glm5Operations
from vime_glm5.structure import Glm5Shape, read_shape, rope_theta
from vime_glm5.vllm.attention import SparseMla
from vime_glm5.vllm.modules import BlockLinear, derive_all, deriving
from vime_vllm.aligned.base import AlignedModel
from vime_vllm.aligned.modules import Embedding, Linear, RmsNorm, Rope, SwiGlu, weight


class Mlp(nn.Module):
    """A SwiGLU MLP of block-FP8 linears: of a dense layer, of the shared expert, or the weights of a routed one."""

    def __init__(self, operations: Glm5Operations, hidden: int, intermediate: int) -> None:
        super().__init__()
        sizes, parts = (intermediate, intermediate), ("gate_proj", "up_proj")
        self.gate_up_proj = BlockLinear(operations, hidden, sizes, parts=parts)
        self.act = SwiGlu(operations)
        self.down_proj = BlockLinear(operations, intermediate, hidden)

    def forward(self, x: Tensor, positions: Tensor, layer: int) -> Tensor:
        """(T, H) of x (T, H)."""
        gate_up = self.gate_up_proj(x)
        tap(layer_tap(layer, "gate_up"), positions, gate_up)
        activated = self.act(gate_up)
        tap(layer_tap(layer, "swiglu"), positions, activated)
        return self.down_proj(activated)


class Gate(nn.Module):
    """The router: weight in the model's dtype, bias in fp32."""

    def __init__(self, operations: Glm5Operations, shape: Glm5Shape) -> None:
        super().__init__()
        self.operations, self.slots = operations, shape.experts_per_token
        self.weight = weight(shape.experts, shape.hidden)
        self.e_score_correction_bias = weight(shape.experts, dtype=torch.float32)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(experts (T, k), weights fp32 (T, k))."""
        return self.operations.route(x, self.weight, self.e_score_correction_bias, self.slots)


class SparseMlp(nn.Module):
    """Router, routed experts, shared expert, combine."""

    def __init__(self, operations: Glm5Operations, shape: Glm5Shape, layer: int) -> None:
        super().__init__()
        self.operations, self.factor, self.layer = operations, shape.factor, layer
        intermediate = shape.expert_intermediate
        self.gate = Gate(operations, shape)
        self.experts = nn.ModuleList(Mlp(operations, shape.hidden, intermediate) for _ in range(shape.experts))
        self.shared_experts = Mlp(operations, shape.hidden, intermediate)

    def forward(self, x: Tensor, positions: Tensor, layer: int) -> Tensor:
        """(T, H) of x (T, H)."""
        choice, weights = self.gate(x)
        tap(layer_tap(layer, "router_slots"), positions, choice)
        tap(layer_tap(layer, "router_weights"), positions, weights)
        held = [cast("Mlp", expert) for expert in self.experts]
        first, second = [e.gate_up_proj.held for e in held], [e.down_proj.held for e in held]
        rows = self.operations.run_experts(x, choice, first, second)
        tap(layer_tap(layer, "expert_rows"), positions, rows)
        shared = self.shared_experts(x, positions, layer)
        tap(layer_tap(layer, "shared_expert"), positions, shared)
        return self.operations.combine(rows, weights, shared, self.factor)


class DecoderLayer(nn.Module):
    """One layer: (x, residual) to (x, residual), where the stream that the next layer reads is their rounded sum."""

    def __init__(self, operations: Glm5Operations, shape: Glm5Shape, vllm_config: Any, layer: int) -> None:
        super().__init__()
        self.layer, dense = layer, layer in shape.dense_layers
        self.input_layernorm = RmsNorm(operations, shape.hidden, shape.eps)
        self.self_attn = SparseMla(operations, shape, vllm_config, layer)
        self.post_attention_layernorm = RmsNorm(operations, shape.hidden, shape.eps)
        mlp = Mlp(operations, shape.hidden, shape.intermediate) if dense else SparseMlp(operations, shape, layer)
        self.mlp: nn.Module = mlp

    def forward(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, rope: Rope, shared: dict[int, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """x and residual (T, H) at positions (T); the first layer has no residual."""
        normed, stream = self.input_layernorm(x, residual)
        if residual is not None:
            tap(layer_tap(self.layer - 1, "hidden_state"), positions, stream)
        self._tap("input_norm", positions, normed)
        attended = self.self_attn(normed, positions, rope, shared)
        self._tap("attention_output", positions, attended)
        normed, stream = self.post_attention_layernorm(attended, stream)
        self._tap("attention_residual", positions, stream)
        self._tap("post_attention_norm", positions, normed)
        output = self.mlp(normed, positions, self.layer)
        self._tap("mlp_output", positions, output)
        return output, stream

    def _tap(self, name: str, positions: Tensor, rows: Tensor) -> None:
        tap(layer_tap(self.layer, name), positions, rows)


class DecoderStack(nn.Module):
    """Embedding, layers, final norm: ids to hidden states."""

    def __init__(self, operations: Glm5Operations, shape: Glm5Shape, theta: float, vllm_config: Any) -> None:
        super().__init__()
        self.embed_tokens = Embedding(operations, shape.vocabulary, shape.hidden)
        self.rope = Rope(operations, shape.positions, shape.rotary, theta, RopeScaling(), interleaved=True)
        self.layers = nn.ModuleList(DecoderLayer(operations, shape, vllm_config, n) for n in range(shape.layers))
        self.norm = RmsNorm(operations, shape.hidden, shape.eps)
        self.last = layer_tap(shape.layers - 1, "hidden_state")

    def forward(self, embedded: Tensor, positions: Tensor) -> Tensor:
        """Hidden states (T, H) of embedded (T, H) at positions (T)."""
        tap(EMBEDDING, positions, embedded)
        x, residual = embedded, None
        shared: dict[int, Tensor] = {}
        for layer in self.layers:
            x, residual = layer(x, residual, positions, self.rope, shared)
        normed, stream = self.norm(x, residual)
        tap(self.last, positions, stream)
        tap(FINAL_NORM, positions, normed)
        return normed


class AlignedGlm5(AlignedModel):
    """GLM-5 under its contracts. vLLM must not take it for MLA, for which a CPU knows one page size and no chunks."""

    engine_environment: ClassVar[Mapping[str, str]] = {"VLLM_MLA_DISABLE": "1"}
    vime_loads_in_place: ClassVar[bool] = False

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        del prefix
        super().__init__(vllm_config)
        config = self.config.to_dict()
        operations = cast("Glm5Operations", self.operations)
        shape = read_shape(config)
        self.model = DecoderStack(operations, shape, rope_theta(config), vllm_config)
        self.lm_head = Linear(operations, shape.hidden, shape.vocabulary)
        self._derived = False

    @staticmethod
    def check_config(config: Any) -> None:
        """Raise PolicyError for a Hugging Face configuration that ``glm5/v1`` does not define."""
        read_shape(config.to_dict())

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """See `AlignedModel.load_weights`; what is derived is made anew before it is next read."""
        self._derived = False
        return super().load_weights(weights)

    def stale_tensors(self) -> list[str]:
        """See `AlignedModel.stale_tensors`."""
        self._derive_once()
        return [
            f"{path} ({name})"
            for path, module in deriving(self)
            for (name, held), made in zip(module.derived().items(), module.fresh().values(), strict=True)
            if not torch.equal(held.view(torch.uint8), made.view(torch.uint8))
        ]

    def begin_step(self, positions: Tensor) -> None:
        """See `AlignedModel.begin_step`; every derived tensor is there first."""
        self._derive_once()
        super().begin_step(positions)

    def logits(self, hidden_states: Tensor) -> Tensor:
        """See `AlignedModel.logits`."""
        return self.lm_head(hidden_states)

    def _derive_once(self) -> None:
        if not self._derived:
            derive_all(self)
            self._derived = True
