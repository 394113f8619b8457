"""``AlignedDecoder``: one vLLM model class for Qwen2, Qwen3 and Llama, built from the operations of ``dense/v1``.

The residual stream is added and rounded where it is normed, as the contract defines it, so a layer hands on two
tensors: what its MLP gave, and the stream before that.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from vime_core.alignment.taps import EMBEDDING, FINAL_NORM, LAYER_TAPS, layer_tap, tap
from vime_core.numerics import Operations
from vime_vllm.aligned.base import AlignedModel
from vime_vllm.aligned.modules import Embedding, Linear, RmsNorm, Rope, SwiGlu, attention_layer, settle_linears
from vime_vllm.aligned.structure import DenseStructure, dense_structure


class SelfAttention(nn.Module):
    """Projections, norms of heads where the structure has them, rotation, attention, output projection."""

    def __init__(self, operations: Operations, structure: DenseStructure, vllm_config: Any, layer: int) -> None:
        super().__init__()
        heads, kv_heads, dim = structure.heads, structure.kv_heads, structure.head_dim
        sizes = (heads * dim, kv_heads * dim, kv_heads * dim)
        self.head_dim, self.heads, self.taps = dim, (heads, kv_heads, kv_heads), _tap_names(layer)
        parts = ("q_proj", "k_proj", "v_proj")
        self.qkv_proj = Linear(operations, structure.hidden, sizes, bias=structure.qkv_bias, parts=parts)
        self.q_norm = RmsNorm(operations, dim, structure.eps) if structure.qk_norm else None
        self.k_norm = RmsNorm(operations, dim, structure.eps) if structure.qk_norm else None
        self.attn = attention_layer(
            operations,
            vllm_config,
            f"model.layers.{layer}.self_attn.attn",
            heads=heads,
            kv_heads=kv_heads,
            head_dim=dim,
        )
        self.o_proj = Linear(operations, sizes[0], structure.hidden, bias=structure.o_bias)

    def forward(self, x: Tensor, positions: Tensor, rope: Rope) -> Tensor:
        """The layer's attention output (T, H) of normed x (T, H) at positions (T)."""
        rows = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim))
        q, k, v = rows.split(self.heads, 1)
        if self.q_norm is None or self.k_norm is None:  # side by side as they were projected: turned by one kernel
            self._tap(positions, q=q, k=k, v=v)
            q, k = rope(rows[:, : -self.heads[2]], positions).split(self.heads[:2], 1)
        else:
            q, k = self.q_norm(q)[0], self.k_norm(k)[0]
            self._tap(positions, q=q, k=k, v=v)
            q, k = rope(q, positions), rope(k, positions)
        self._tap(positions, q_rope=q, k_rope=k)
        attended = self.attn(q, k, v)
        output = self.o_proj(attended)
        self._tap(positions, attention=attended, attention_output=output)
        return output

    def _tap(self, positions: Tensor, **rows: Tensor) -> None:
        for name, tensor in rows.items():
            tap(self.taps[name], positions, tensor)


class Mlp(nn.Module):
    """Gate and up as one projection, SwiGLU, down."""

    def __init__(self, operations: Operations, structure: DenseStructure, layer: int) -> None:
        super().__init__()
        hidden, size, bias = structure.hidden, structure.intermediate, structure.mlp_bias
        self.taps = _tap_names(layer)
        self.gate_up_proj = Linear(operations, hidden, (size, size), bias=bias, parts=("gate_proj", "up_proj"))
        self.act = SwiGlu(operations)
        self.down_proj = Linear(operations, size, hidden, bias=bias)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """The MLP's output (T, H) of normed x (T, H)."""
        gate_up = self.gate_up_proj(x)
        tap(self.taps["gate_up"], positions, gate_up)
        activated = self.act(gate_up)
        tap(self.taps["swiglu"], positions, activated)
        output = self.down_proj(activated)
        tap(self.taps["mlp_output"], positions, output)
        return output


class DecoderLayer(nn.Module):
    """One layer: (x, residual) to (x, residual), where the stream that the next layer reads is their rounded sum."""

    def __init__(self, operations: Operations, structure: DenseStructure, vllm_config: Any, layer: int) -> None:
        super().__init__()
        self.taps = _tap_names(layer)
        self.before = layer_tap(layer - 1, "hidden_state") if layer else ""
        self.input_layernorm = RmsNorm(operations, structure.hidden, structure.eps)
        self.self_attn = SelfAttention(operations, structure, vllm_config, layer)
        self.post_attention_layernorm = RmsNorm(operations, structure.hidden, structure.eps)
        self.mlp = Mlp(operations, structure, layer)

    def forward(self, x: Tensor, residual: Tensor | None, positions: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """x and residual (T, H) at positions (T); the first layer has no residual."""
        normed, stream = self.input_layernorm(x, residual)
        if residual is not None:
            tap(self.before, positions, stream)
        tap(self.taps["input_norm"], positions, normed)
        attended = self.self_attn(normed, positions, rope)
        normed, stream = self.post_attention_layernorm(attended, stream)
        tap(self.taps["attention_residual"], positions, stream)
        tap(self.taps["post_attention_norm"], positions, normed)
        return self.mlp(normed, positions), stream


class DecoderStack(nn.Module):
    """Embedding, layers, final norm: ids to hidden states."""

    def __init__(self, operations: Operations, structure: DenseStructure, vllm_config: Any) -> None:
        super().__init__()
        self.embed_tokens = Embedding(operations, structure.vocabulary, structure.hidden)
        self.rope = Rope(operations, structure.positions, structure.head_dim, structure.theta, structure.scaling)
        self.layers = nn.ModuleList(
            DecoderLayer(operations, structure, vllm_config, layer) for layer in range(structure.layers)
        )
        self.norm = RmsNorm(operations, structure.hidden, structure.eps)
        self.last = layer_tap(structure.layers - 1, "hidden_state")

    def forward(self, embedded: Tensor, positions: Tensor) -> Tensor:
        """Hidden states (T, H) of embedded (T, H) at positions (T)."""
        tap(EMBEDDING, positions, embedded)
        x, residual = embedded, None
        for layer in self.layers:
            x, residual = layer(x, residual, positions, self.rope)
        normed, stream = self.norm(x, residual)
        tap(self.last, positions, stream)
        tap(FINAL_NORM, positions, normed)
        return normed


class AlignedDecoder(AlignedModel):
    """Qwen2, Qwen3 and Llama under ``dense/v1``."""

    model_runner: ClassVar[str] = "V2"

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        del prefix
        super().__init__(vllm_config)
        structure = self.structure_of(self.config)
        self.model = DecoderStack(self.operations, structure, vllm_config)
        self.lm_head = None if structure.tied else Linear(self.operations, structure.hidden, structure.vocabulary)
        if structure.tied:
            self.ignored_weights = (*self.ignored_weights, "lm_head.weight")
        settle_linears(self, self.operations, [self.model.embed_tokens.weight] if structure.tied else [])

    @staticmethod
    def structure_of(config: Any) -> DenseStructure:
        """What is built of a Hugging Face configuration; a subclass for another structure says it anew."""
        return dense_structure(config)

    @classmethod
    def check_config(cls, config: Any) -> None:
        """Raise PolicyError for a Hugging Face configuration that the contract does not cover."""
        cls.structure_of(config)

    def logits(self, hidden_states: Tensor) -> Tensor:
        """See `AlignedModel.logits`; of the embedding's matrix where it is tied."""
        if self.lm_head is None:
            return self.operations.linear(hidden_states, self.model.embed_tokens.weight)
        return self.lm_head(hidden_states)


def _tap_names(layer: int) -> dict[str, str]:
    return {name: layer_tap(layer, name) for name in LAYER_TAPS}
