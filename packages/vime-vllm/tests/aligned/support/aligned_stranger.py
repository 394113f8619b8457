"""A structure that no package of ours knows, under a contract: windows in every second layer, post norms, soft caps."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from vime_core.alignment.taps import layer_tap, tap
from vime_core.errors import PolicyError
from vime_core.numerics import rope_scaling
from vime_vllm.aligned.base import AlignedModel
from vime_vllm.aligned.modules import Embedding, Linear, RmsNorm, Rope, SwiGlu, attention_layer


class StrangeLayer(nn.Module):
    """Norms before and after attention and MLP; attention over a window in even layers."""

    def __init__(self, operations: Any, config: Any, vllm_config: Any, layer: int) -> None:
        super().__init__()
        hidden, size, dim = config.hidden_size, config.intermediate_size, config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.dim, self.layer = dim, layer
        self.sizes = (heads * dim, kv_heads * dim, kv_heads * dim)
        for name in ("before_attention", "after_attention", "before_mlp", "after_mlp"):
            setattr(self, name, RmsNorm(operations, hidden, config.rms_norm_eps))
        self.qkv = Linear(operations, hidden, self.sizes, parts=("q", "k", "v"))
        self.attention = attention_layer(
            operations,
            vllm_config,
            f"layers.{layer}.attention",
            heads=heads,
            kv_heads=kv_heads,
            head_dim=dim,
            scale=config.stranger_scale,
            window=config.stranger_window if layer % 2 == 0 else None,
            soft_cap=config.stranger_cap,
        )
        self.o = Linear(operations, heads * dim, hidden)
        self.gate_up = Linear(operations, hidden, (size, size), parts=("gate", "up"))
        self.act = SwiGlu(operations)
        self.down = Linear(operations, size, hidden)

    def forward(self, stream: Tensor, positions: Tensor, rope: Rope) -> Tensor:
        x = self.before_attention(stream)[0]
        q, k, v = (part.unflatten(-1, (-1, self.dim)) for part in self.qkv(x).split(self.sizes, -1))
        x = self.after_attention(self.o(self.attention(rope(q, positions), rope(k, positions), v)))[0]
        x, stream = self.before_mlp(x, stream)
        x = self.after_mlp(self.down(self.act(self.gate_up(x))))[0]
        stream = (x.float() + stream.float()).to(x.dtype)
        tap(layer_tap(self.layer, "hidden_state"), positions, stream)
        return stream


class Stranger(AlignedModel):
    """The engine side, as a plugin outside of vime would name it: ``aligned_stranger:Stranger``."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        del prefix
        super().__init__(vllm_config)
        config, op = self.config, self.operations
        theta, scaling = rope_scaling(config.rope_parameters, config.max_position_embeddings)
        self.embed = Embedding(op, config.vocab_size, config.hidden_size)
        self.rope = Rope(op, config.max_position_embeddings, config.head_dim, theta, scaling, interleaved=True)
        self.layers = nn.ModuleList(StrangeLayer(op, config, vllm_config, i) for i in range(config.num_hidden_layers))
        self.norm = RmsNorm(op, config.hidden_size, config.rms_norm_eps)

    @staticmethod
    def check_config(config: Any) -> None:
        if not config.stranger_window:
            raise PolicyError("stranger_window is missing", remedy="Set it.", code="VIME-STRANGER-001")

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.embed(input_ids)

    def forward(
        self, input_ids: Tensor, positions: Tensor, intermediate_tensors: Any = None, inputs_embeds: Any = None
    ) -> Tensor:
        del intermediate_tensors, inputs_embeds
        self.begin_step(positions)
        stream = self.embed_input_ids(input_ids)
        for layer in self.layers:
            stream = layer(stream, positions, self.rope)
        return self.norm(stream)[0]

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        logits = self.operations.linear(hidden_states, self.embed.weight)
        logits = self.operations.soft_cap(logits, self.config.stranger_logit_cap)
        self.tap_logits(logits)
        return logits.float()
