"""Lantern in the engine: a vLLM model class from the contract's operations, under the names of a model directory."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from vime_core.alignment.taps import EMBEDDING, FINAL_NORM, layer_tap, tap
from vime_core.errors import PolicyError
from vime_core.numerics import Operations, rope_scaling
from vime_lantern.config import LanternConfig
from vime_vllm.aligned.base import AlignedModel
from vime_vllm.aligned.modules import Embedding, Linear, RmsNorm, Rope, SwiGlu, attention_layer


class Attention(nn.Module):
    """Projections, rotation, attention over all keys or a window, output projection."""

    def __init__(self, operations: Operations, config: LanternConfig, vllm_config: Any, layer: int) -> None:
        super().__init__()
        heads, kv_heads, self.dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.layer, self.sizes = layer, (heads * self.dim, kv_heads * self.dim, kv_heads * self.dim)
        self.qkv_proj = Linear(operations, config.hidden_size, self.sizes, parts=("q_proj", "k_proj", "v_proj"))
        self.attn = attention_layer(
            operations,
            vllm_config,
            f"model.layers.{layer}.self_attn.attn",
            heads=heads,
            kv_heads=kv_heads,
            head_dim=self.dim,
            window=None if layer % 2 else config.window,
            soft_cap=config.score_cap,
        )
        self.o_proj = Linear(operations, self.sizes[0], config.hidden_size)

    def forward(self, x: Tensor, positions: Tensor, rope: Rope) -> Tensor:
        """(T, H) of normed x (T, H) at positions (T)."""
        q, k, v = (part.unflatten(-1, (-1, self.dim)) for part in self.qkv_proj(x).split(self.sizes, -1))
        turned = rope(q, positions), rope(k, positions)
        attended = self.attn(*turned, v)
        for name, rows in zip(("q", "k", "v", "q_rope", "k_rope"), (q, k, v, *turned), strict=True):
            tap(layer_tap(self.layer, name), positions, rows)
        tap(layer_tap(self.layer, "attention"), positions, attended)
        return self.o_proj(attended)


class Mlp(nn.Module):
    """Gate and up as one projection, SwiGLU, down."""

    def __init__(self, operations: Operations, config: LanternConfig, layer: int) -> None:
        super().__init__()
        hidden, size = config.hidden_size, config.intermediate_size
        self.layer = layer
        self.gate_up_proj = Linear(operations, hidden, (size, size), parts=("gate_proj", "up_proj"))
        self.act = SwiGlu(operations)
        self.down_proj = Linear(operations, size, hidden)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """(T, H) of normed x (T, H)."""
        gate_up = self.gate_up_proj(x)
        activated = self.act(gate_up)
        output = self.down_proj(activated)
        for name, rows in (("gate_up", gate_up), ("swiglu", activated), ("mlp_output", output)):
            tap(layer_tap(self.layer, name), positions, rows)
        return output


class Layer(nn.Module):
    """Norms before and after attention and MLP."""

    def __init__(self, operations: Operations, config: LanternConfig, vllm_config: Any, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.self_attn = Attention(operations, config, vllm_config, layer)
        self.mlp = Mlp(operations, config, layer)
        for name in ("input_layernorm", "after_attention_norm", "post_attention_layernorm", "after_mlp_norm"):
            setattr(self, name, RmsNorm(operations, config.hidden_size, config.rms_norm_eps))

    def forward(self, x: Tensor | None, stream: Tensor, positions: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """(x, residual) to (x, residual), both (T, H): the stream that the next layer reads is their rounded sum."""
        normed, stream = add_norm(self.input_layernorm, x, stream)
        if self.layer:
            tap(layer_tap(self.layer - 1, "hidden_state"), positions, stream)
        self._tap("input_norm", positions, normed)
        attended = self.self_attn(normed, positions, rope)
        self._tap("attention_output", positions, attended)
        normed, stream = self.post_attention_layernorm(self.after_attention_norm(attended)[0], stream)
        self._tap("attention_residual", positions, stream)
        self._tap("post_attention_norm", positions, normed)
        return self.after_mlp_norm(self.mlp(normed, positions))[0], stream

    def _tap(self, name: str, positions: Tensor, rows: Tensor) -> None:
        tap(layer_tap(self.layer, name), positions, rows)


def add_norm(norm: RmsNorm, x: Tensor | None, stream: Tensor) -> tuple[Tensor, Tensor]:
    """(norm, x + stream), all (T, H); before the first layer there is nothing to add."""
    return norm(stream) if x is None else norm(x, stream)


class Stack(nn.Module):
    """Embedding, layers, final norm: ids to hidden states."""

    def __init__(self, operations: Operations, config: LanternConfig, vllm_config: Any) -> None:
        super().__init__()
        theta, scaling = rope_scaling(config.rope_parameters, config.max_position_embeddings)
        self.embed_tokens = Embedding(operations, config.vocab_size, config.hidden_size)
        self.rope = Rope(operations, config.max_position_embeddings, config.head_dim, theta, scaling)
        self.layers = nn.ModuleList(
            Layer(operations, config, vllm_config, layer) for layer in range(config.num_hidden_layers)
        )
        self.norm = RmsNorm(operations, config.hidden_size, config.rms_norm_eps)
        self.last = config.num_hidden_layers - 1

    def forward(self, embedded: Tensor, positions: Tensor) -> Tensor:
        """Hidden states (T, H) of embedded (T, H) at positions (T)."""
        tap(EMBEDDING, positions, embedded)
        x, stream = None, embedded
        for layer in self.layers:
            x, stream = layer(x, stream, positions, self.rope)
        hidden, stream = add_norm(self.norm, x, stream)
        tap(layer_tap(self.last, "hidden_state"), positions, stream)
        tap(FINAL_NORM, positions, hidden)
        return hidden


class AlignedLantern(AlignedModel):
    """Lantern under ``lantern/v1``."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        del prefix
        super().__init__(vllm_config)
        self.model = Stack(self.operations, self.config, vllm_config)
        self.ignored_weights = (*self.ignored_weights, "lm_head.weight")

    @staticmethod
    def check_config(config: LanternConfig) -> None:
        """Raise PolicyError for a configuration that ``lantern/v1`` does not cover."""
        if not config.tie_word_embeddings:
            raise PolicyError(
                "lantern/v1 has one matrix for embedding and logits, but tie_word_embeddings = False",
                remedy="Take a model with tie_word_embeddings = true.",
                code="VIME-LANTERN-001",
            )

    def logits(self, hidden_states: Tensor) -> Tensor:
        """See `AlignedModel.logits`; capped."""
        logits = self.operations.linear(hidden_states, self.model.embed_tokens.weight)
        return self.operations.soft_cap(logits, self.config.logit_cap)
