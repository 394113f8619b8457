"""A whole-sequence forward from a Hugging Face directory's weights and the contract's packed operations.

Written apart from the engine's model class: it knows tensors by name only, and no cache, page, chunk or batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vime_core.numerics import AttentionSpec, Operations, masked, rope_scaling, rope_table
from vime_core.types import Completion, Float32Array, SampleRequest

Seen = Callable[[str, Tensor], object]


@dataclass(frozen=True)
class Reference:
    """A dense decoder; ``config`` is a config.json, ``weights`` by Hugging Face names."""

    operations: Operations
    config: Mapping[str, Any]
    weights: Mapping[str, Tensor]

    def logits(self, tokens: Sequence[int], seen: Seen = lambda *_: None) -> Tensor:
        """(T, V) of the whole sequence; ``seen`` gets every named intermediate."""
        op, w, c = self.operations, self.weights, self.config
        dim = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
        theta, scaling = rope_scaling(c["rope_parameters"], c["max_position_embeddings"])
        table = rope_table(len(tokens), dim, theta, scaling)
        positions = torch.arange(len(tokens))
        cu_seqlens = torch.tensor([0, len(tokens)])
        x = op.embedding(torch.tensor(tokens), w["model.embed_tokens.weight"])
        seen("embedding", x)
        for layer in range(c["num_hidden_layers"]):
            at, name = f"model.layers.{layer}.", f"layers.{layer}."

            def norm(x: Tensor, which: str, at: str = at) -> Tensor:
                return op.rms_norm(x.contiguous(), w[f"{at}{which}.weight"], c["rms_norm_eps"])

            def linear(x: Tensor, which: str, at: str = at) -> Tensor:
                return op.linear(x, w[f"{at}{which}.weight"], w.get(f"{at}{which}.bias"))

            normed = norm(x, "input_layernorm")
            q, k, v = (linear(normed, f"self_attn.{p}_proj").unflatten(-1, (-1, dim)) for p in "qkv")
            if f"{at}self_attn.q_norm.weight" in w:
                q, k = norm(q, "self_attn.q_norm"), norm(k, "self_attn.k_norm")
            q_rope, k_rope = op.rope(q, positions, table), op.rope(k, positions, table)
            attended = op.attention_packed(q_rope, k_rope, v, cu_seqlens, AttentionSpec(dim**-0.5))[0].flatten(1)
            output = linear(attended, "self_attn.o_proj")
            x = add(x, output)
            after = norm(x, "post_attention_layernorm")
            gate_up = torch.cat([linear(after, "mlp.gate_proj"), linear(after, "mlp.up_proj")], -1)
            activated = op.swiglu(gate_up)
            down = linear(activated, "mlp.down_proj")
            residual, x = x, add(x, down)
            values = (normed, q, k, v, q_rope, k_rope, attended, output, residual, after, gate_up, activated, down, x)
            for tap, value in zip(TAPS, values, strict=True):
                seen(name + tap, value)
        x = op.rms_norm(x, w["model.norm.weight"], c["rms_norm_eps"])
        seen("final_norm", x)
        logits = op.linear(x, w.get("lm_head.weight", w["model.embed_tokens.weight"]))
        seen("logits", logits)
        return logits

    def log_probs(self, request: SampleRequest, tokens: Sequence[int], temperature: float) -> Float32Array:
        """fp32 [R] of a response, after top-k and top-p."""
        first = len(request.prompt_tokens) - 1
        logits = self.logits([*request.prompt_tokens, *tokens])[first:-1]
        if request.top_k or request.top_p < 1:
            keep = self.operations.keep_mask(logits, temperature, request.top_k, request.top_p)
            logits = masked(logits, keep)
        return self.operations.token_log_probs(logits, torch.tensor(tokens), temperature).numpy()


TAPS = (
    *("input_norm", "q", "k", "v", "q_rope", "k_rope", "attention", "attention_output", "attention_residual"),
    *("post_attention_norm", "gate_up", "swiglu", "mlp_output", "hidden_state"),
)


def add(a: Tensor, b: Tensor) -> Tensor:
    """The residual stream: one rounding."""
    return (a.float() + b.float()).to(a.dtype)


def unequal_bits(left: Float32Array, right: Float32Array) -> int:
    """How many elements differ in a bit."""
    assert left.shape == right.shape
    assert left.dtype == right.dtype == np.float32
    return int((left.view(np.int32) != right.view(np.int32)).sum())


@dataclass(frozen=True)
class Comparison:
    """What a comparison covered and found."""

    tokens: int
    unequal: int
    spread: float
    """Standard deviation of the log-probs: near-constant ones would prove nothing."""


def compare(
    reference: Reference,
    requests: Sequence[SampleRequest],
    completions: Sequence[Completion],
    temperature_factor: float = 1.0,
) -> Comparison:
    """Completions against the whole-sequence forward, at each request's temperature times a factor."""
    found: list[Float32Array] = []
    unequal = 0
    for request, completion in zip(requests, completions, strict=True):
        temperature = request.temperature * temperature_factor
        expected = reference.log_probs(request, completion.tokens, temperature)
        unequal += unequal_bits(expected, completion.log_probs)
        found.append(completion.log_probs)
    values = np.concatenate(found)
    return Comparison(len(values), unequal, float(values.std()))
