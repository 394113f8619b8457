"""For tests of a contract's side: random models of many shapes, and a forward that shares only the operations."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from vime_core.alignment import Alignment
from vime_core.alignment.taps import EMBEDDING, FINAL_NORM, LOGITS, layer_tap
from vime_core.numerics import DENSE_V1, AttentionSpec, Operations, rope_scaling, rope_table
from vime_core.types import TrainSequence

DENSE_ALIGNMENT = Alignment(DENSE_V1, "cpu", "vime_megatron.aligned.dense:DENSE", "")


def random_shape(seed: int) -> dict[str, Any]:
    """Keywords of a dense HF configuration: layers, heads, head size, odd widths, tying, biases and rotary embedding
    vary."""
    draw = np.random.default_rng(seed)

    def one_of(*values: Any) -> Any:
        return values[int(draw.integers(len(values)))]

    groups, head_dim = one_of(1, 2, 3), one_of(32, 64, 128)
    heads = groups * one_of(1, 2, 3)
    scaled = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = one_of(
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 2.5},
        {**scaled, "original_max_position_embeddings": 64},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    )
    return {
        "attention_bias": one_of(True, False),
        "mlp_bias": one_of(True, False),
        "num_hidden_layers": one_of(1, 2, 3, 4),
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": head_dim,
        "hidden_size": heads * one_of(13, 16, 30),  # transformers wants a multiple
        "intermediate_size": int(draw.integers(33, 200)),
        "vocab_size": int(draw.integers(97, 400)),
        "rms_norm_eps": one_of(1e-5, 1e-6),
        "tie_word_embeddings": one_of(True, False),
        "max_position_embeddings": 256,
        "rope_parameters": {**rope, "rope_theta": one_of(1e4, 5e5, 1e6)},
    }


@dataclass(frozen=True)
class WholeSequence:
    """A dense decoder written out over HF weights: one sequence at a time, separate projections, no Megatron.

    Args:
        operations: all that it has in common with the trainer.
        config: ``config.json``.
        weights: by HF name, in the dtype of the computation.
    """

    operations: Operations
    config: Mapping[str, Any]
    weights: Mapping[str, Tensor]

    @classmethod
    def open(cls, operations: Operations, directory: Path, dtype: torch.dtype) -> WholeSequence:
        """Read a HF model directory."""
        config = json.loads((directory / "config.json").read_text())
        weights = {name: tensor.to(dtype) for name, tensor in load_file(directory / "model.safetensors").items()}
        return cls(operations, config, weights)

    def log_probs(
        self,
        sequence: TrainSequence,
        temperature: float,
        tap: Callable[[str, Tensor], None] = lambda _name, _rows: None,
    ) -> Tensor:
        """fp32 [R] of the response; ``tap`` sees every intermediate result by its name."""
        tokens = torch.tensor(sequence.tokens)
        stream = self.operations.embedding(tokens[:-1], self.weights["model.embed_tokens.weight"])
        tap(EMBEDDING, stream)
        for layer in range(self.config["num_hidden_layers"]):
            stream = self._layer(layer, stream, tap)
        hidden = self._norm("model.norm", stream)
        tap(FINAL_NORM, hidden)
        head = self.weights.get("lm_head.weight", self.weights["model.embed_tokens.weight"])
        logits = self.operations.linear(hidden[sequence.response_start - 1 :], head)
        tap(LOGITS, logits)
        return self.operations.token_log_probs(logits, tokens[sequence.response_start :], temperature)

    def _layer(self, layer: int, stream: Tensor, tap: Callable[[str, Tensor], None]) -> Tensor:
        prefix = f"model.layers.{layer}."

        def seen(name: str, rows: Tensor) -> Tensor:
            tap(layer_tap(layer, name), rows.flatten(1))
            return rows

        normed = seen("input_norm", self._norm(f"{prefix}input_layernorm", stream))
        attended = seen("attention_output", self._attention(f"{prefix}self_attn.", normed, seen))
        post = self.weights[f"{prefix}post_attention_layernorm.weight"]
        normed, stream = self.operations.add_rms_norm(attended, stream, post, self.config["rms_norm_eps"])
        seen("attention_residual", stream)
        seen("post_attention_norm", normed)
        pair = [self._linear(f"{prefix}mlp.{which}_proj", normed) for which in ("gate", "up")]
        activated = seen("swiglu", self.operations.swiglu(seen("gate_up", torch.cat(pair, -1))))
        output = seen("mlp_output", self._linear(f"{prefix}mlp.down_proj", activated))
        return seen("hidden_state", self.operations.add_rms_norm(output, stream, post, 1e-6)[1])

    def _attention(self, prefix: str, x: Tensor, seen: Callable[[str, Tensor], Tensor]) -> Tensor:
        head_dim = self.config.get("head_dim") or self.config["hidden_size"] // self.config["num_attention_heads"]
        heads = {w: self._linear(f"{prefix}{w}_proj", x).unflatten(-1, (-1, head_dim)) for w in "qkv"}
        for which in "qk":
            name = f"{prefix}{which}_norm"
            heads[which] = self._norm(name, heads[which]) if f"{name}.weight" in self.weights else heads[which]
        query, key, value = (seen(which, heads[which]) for which in "qkv")
        positions, table = torch.arange(len(x)), self._table(head_dim)
        query = seen("q_rope", self.operations.rope(query, positions, table))
        key = seen("k_rope", self.operations.rope(key, positions, table))
        ends, spec = torch.tensor([0, len(x)]), AttentionSpec(head_dim**-0.5)
        output, _ = self.operations.attention_packed(query, key, value, ends, spec)
        return self._linear(f"{prefix}o_proj", seen("attention", output).flatten(1))

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return self.operations.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return self.operations.rms_norm(x, self.weights[f"{name}.weight"], self.config["rms_norm_eps"])

    def _table(self, head_dim: int) -> Tensor:
        positions = self.config["max_position_embeddings"]
        return rope_table(positions, head_dim, *rope_scaling(self.config["rope_parameters"], positions))


def unequal_bits(first: Tensor, second: Tensor) -> int:
    """How many elements differ in their bits; NaN always does.

    Raises:
        ValueError: shapes or dtypes differ, or there is nothing to compare.
    """
    if first.shape != second.shape or first.dtype != second.dtype or not first.numel():
        raise ValueError(f"cannot compare {first.dtype} {tuple(first.shape)} with {second.dtype} {tuple(second.shape)}")
    integers = {2: torch.int16, 4: torch.int32}[first.element_size()]
    differs = first.contiguous().view(integers) != second.contiguous().view(integers)
    return int((differs | first.isnan() | second.isnan()).sum())
