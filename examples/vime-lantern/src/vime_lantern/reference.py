"""Lantern in plain torch, in any precision: what gradients are held to. It shares nothing with either side."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from vime_core.numerics import Contract


class Lantern(nn.Module):
    """``model(ids [1, T]).logits`` [1, T, V], with parameters under the names of a model directory.

    Args:
        config: its ``config.json``.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.config = SimpleNamespace(**config)
        self.model = Stack(self.config)

    def forward(self, ids: Tensor, **_: Any) -> SimpleNamespace:
        """See the class."""
        logits = self.model(ids[0]) @ self.model.embed_tokens.weight.t()
        return SimpleNamespace(logits=cap(logits, self.config.logit_cap)[None])


def open_reference(
    contract: Contract, directory: Path, weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype
) -> Lantern:
    """The model of a directory with the given weights, computing in ``dtype``. ``contract`` has no choices."""
    del contract
    model = Lantern(json.loads((directory / "config.json").read_text())).to(dtype)
    model.load_state_dict(dict(weights))
    return model


class Stack(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, number) for number in range(config.num_hidden_layers))
        self.norm = Norm(config)

    def forward(self, ids: Tensor) -> Tensor:
        stream = self.embed_tokens(ids)
        for layer in self.layers:
            stream = layer(stream)
        return self.norm(stream)


class Layer(nn.Module):
    def __init__(self, config: Any, number: int) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(config, number), Mlp(config)
        for name in ("input_layernorm", "after_attention_norm", "post_attention_layernorm", "after_mlp_norm"):
            setattr(self, name, Norm(config))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.after_attention_norm(self.self_attn(self.input_layernorm(x)))
        return x + self.after_mlp_norm(self.mlp(self.post_attention_layernorm(x)))


class Attention(nn.Module):
    def __init__(self, config: Any, number: int) -> None:
        super().__init__()
        self.config, self.window = config, None if number % 2 else config.window
        width, heads = config.hidden_size, config.num_attention_heads * config.head_dim
        kv_heads = config.num_key_value_heads * config.head_dim
        self.q_proj, self.o_proj = linear(width, heads), linear(heads, width)
        self.k_proj, self.v_proj = linear(width, kv_heads), linear(width, kv_heads)

    def forward(self, x: Tensor) -> Tensor:
        c, dim = self.config, self.config.head_dim
        q, k, v = (p(x).view(len(x), -1, dim).transpose(0, 1) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(q, c.rope_parameters["rope_theta"]), rotate(k, c.rope_parameters["rope_theta"])
        k, v = (t.repeat_interleave(len(q) // len(t), 0) for t in (k, v))
        scores = cap(q @ k.transpose(1, 2) * dim**-0.5, c.score_cap)
        distance = torch.arange(len(x))[:, None] - torch.arange(len(x))
        hidden = (distance < 0) | (distance >= (self.window or len(x)))
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return self.o_proj((weights @ v).transpose(0, 1).flatten(1))


class Mlp(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        width, size = config.hidden_size, config.intermediate_size
        self.gate_proj, self.up_proj, self.down_proj = linear(width, size), linear(width, size), linear(size, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Norm(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(config.hidden_size)), config.rms_norm_eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def cap(x: Tensor, bound: float) -> Tensor:
    return bound * torch.tanh(x / bound)


def rotate(x: Tensor, theta: float) -> Tensor:
    """x (heads, T, dim), halves against each other."""
    half = x.shape[-1] // 2
    frequencies = theta ** -(torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * frequencies
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
