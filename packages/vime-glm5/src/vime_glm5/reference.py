"""GLM-5 once more, in plain torch autograd: what gradients of the contracts are checked against.

Every operation is computed twice. Its value comes from the contract's operation, without a gradient, so that roundings,
chosen keys and routes are those of the forward that is checked; its derivative is autograd's of the formula that the
operation's module states, in fp64 (or another dtype), at these values. Quantisations are straight through, experts
differentiated at their unquantised fc1, as the contract defines it. Nothing of the operations' backward is used.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from vime_core.numerics import Contract, rope_table
from vime_glm5.numerics import Glm5Operations, load_operations
from vime_glm5.structure import Glm5Shape, read_shape, rope_theta
from vime_megatron.autograd import apply

UNTRAINED = (".indexer.", "e_score_correction_bias")


@dataclass(frozen=True)
class Twice:
    """One intermediate: ``value`` as the contract computes it, ``traced`` the same numbers with a history."""

    value: Tensor
    traced: Tensor


class _Forced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, traced: Tensor, value: Tensor) -> Tensor:
        del ctx
        return value.to(traced.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        del ctx
        return grads[0], None


def forced(value: Tensor, traced: Tensor) -> Twice:
    """The value of one computation with the derivative of another."""
    return Twice(value, apply(_Forced, traced, value))


def open_reference(
    contract: Contract, directory: Path, weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype
) -> Glm5Reference:
    """What ``ContractEntry.reference`` names: see `vime_core.verify.reference_model.open_reference`. On the CPU."""
    config = json.loads((directory / "config.json").read_text())
    shape, held = read_shape(config), {name: tensor.cpu() for name, tensor in weights}
    table = rope_table(shape.positions, shape.rotary, rope_theta(config))
    return Glm5Reference(load_operations(contract, "cpu"), shape, held, table, dtype)


class Glm5Reference:
    """Called with token ids [1, T] it gives an object with ``logits`` [1, T, V], as transformers' models do.

    Args:
        operations: of the contract.
        shape: of the model.
        weights: masters by HF name.
        table: fp32 [positions, R], cosines and sines.
        dtype: of derivatives.
    """

    def __init__(
        self,
        operations: Glm5Operations,
        shape: Glm5Shape,
        weights: dict[str, Tensor],
        table: Tensor,
        dtype: torch.dtype,
    ) -> None:
        self._ops, self._shape, self._table = operations, shape, table
        trained = {n: not any(part in n for part in UNTRAINED) for n in weights}
        self._weights = {
            name: Twice(value, value.detach().to(dtype, copy=True).requires_grad_(trained[name]))
            for name, value in weights.items()
        }
        self._chosen: dict[int, Tensor] = {}

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The trained weights, by HF name."""
        return ((name, one.traced) for name, one in self._weights.items() if one.traced.requires_grad)

    def __call__(self, tokens: Tensor, *, use_cache: bool = False) -> Any:
        """See the class."""
        del use_cache
        ids, embedding = tokens[0], self._weights["model.embed_tokens.weight"]
        with torch.no_grad():
            value = self._ops.embedding(ids, embedding.value)
        stream = forced(value, embedding.traced[ids])
        for layer in range(self._shape.layers):
            stream = self._layer(f"model.layers.{layer}.", layer, stream)
        logits = self._linear(self._norm(stream, "model.norm"), "lm_head")
        return SimpleNamespace(logits=logits.traced.unsqueeze(0))

    def _layer(self, at: str, layer: int, stream: Twice) -> Twice:
        attended = self._attention(f"{at}self_attn.", layer, self._norm(stream, f"{at}input_layernorm"))
        stream = _added(attended, stream)
        normed = self._norm(stream, f"{at}post_attention_layernorm")
        dense = layer in self._shape.dense_layers
        return _added((self._mlp if dense else self._sparse)(f"{at}mlp.", normed), stream)

    def _norm(self, x: Twice, name: str) -> Twice:
        weight, eps = self._weights[f"{name}.weight"], self._shape.eps
        with torch.no_grad():
            value = self._ops.rms_norm(x.value.contiguous(), weight.value, eps)
        mean = x.traced.pow(2).mean(-1, keepdim=True)
        return forced(value, x.traced * torch.rsqrt(mean + eps) * weight.traced)

    def _linear(self, x: Twice, name: str) -> Twice:
        weight = self._weights[f"{name}.weight"]
        with torch.no_grad():
            value = self._ops.linear(x.value, weight.value)
        return forced(value, x.traced @ weight.traced.mT)

    def _block(self, x: Twice, name: str) -> Twice:
        weight = self._weights[f"{name}.weight"]
        with torch.no_grad():
            value = self._ops.block_linear(x.value, weight.value)
        return forced(value, x.traced @ weight.traced.mT)

    def _rope(self, x: Twice) -> Twice:
        positions = torch.arange(len(x.value))
        with torch.no_grad():
            value = self._ops.rope(x.value.contiguous(), positions, self._table, True)
        cos, sin = self._table[positions].unsqueeze(1).to(x.traced.dtype).chunk(2, -1)
        a, b = x.traced[..., ::2], x.traced[..., 1::2]
        return forced(value, torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2))

    def _attention(self, at: str, layer: int, x: Twice) -> Twice:
        s, ops = self._shape, self._ops
        latent = self._norm(self._block(x, f"{at}q_a_proj"), f"{at}q_a_layernorm")
        if layer in s.indexed_layers:
            self._chosen[layer] = self._choose(f"{at}indexer.", x.value, latent.value)
        keys, values = self._absorbed(f"{at}kv_b_proj")
        q = self._queries(self._block(latent, f"{at}q_b_proj"), keys)
        k, chosen = self._keys(self._block(x, f"{at}kv_a_proj_with_mqa"), at), self._chosen[s.choosing_layer(layer)]
        with torch.no_grad():
            value = ops.sparse_attention(q.value, k.value, chosen, s.scale, s.kv_lora)
        picked = k.traced[chosen.clamp_min(0).long()]
        scores = torch.einsum("thw,tkw->thk", q.traced, picked) * s.scale
        weights = scores.masked_fill((chosen < 0).unsqueeze(1), -torch.inf).softmax(-1)
        attended = forced(value, torch.einsum("thk,tkl->thl", weights, picked[..., : s.kv_lora]))
        with torch.no_grad():
            value = ops.head_linear(attended.value, values.value)
        output = forced(value, torch.einsum("thl,hvl->thv", attended.traced, values.traced))
        return self._block(Twice(output.value.flatten(1), output.traced.flatten(1)), f"{at}o_proj")

    def _absorbed(self, name: str) -> tuple[Twice, Twice]:
        """(heads, L, nope) and (heads, v, L)."""
        s, weight = self._shape, self._weights[f"{name}.weight"]
        with torch.no_grad():
            held = self._ops.absorbed_weights(weight.value, s.heads, s.nope)
        by_head = weight.traced.unflatten(0, (s.heads, -1))
        return forced(held.keys, by_head[:, : s.nope].mT), forced(held.values, by_head[:, s.nope :])

    def _queries(self, projected: Twice, keys: Twice) -> Twice:
        s = self._shape
        heads = _heads(projected, s.heads)
        nope, rotary = _each(heads, lambda t: t[..., : s.nope]), _each(heads, lambda t: t[..., s.nope :])
        with torch.no_grad():
            value = self._ops.head_linear(nope.value, keys.value)
        absorbed = forced(value, torch.einsum("thn,hln->thl", nope.traced, keys.traced))
        return _joined(absorbed, self._rope(rotary))

    def _keys(self, projected: Twice, at: str) -> Twice:
        size = self._shape.kv_lora
        latent = self._norm(_each(projected, lambda t: t[:, :size]), f"{at}kv_a_layernorm")
        rotated = self._rope(_each(projected, lambda t: t[:, None, size:]))
        rotated = _each(rotated, lambda t: t.squeeze(1))
        with torch.no_grad():
            value = self._ops.cached_keys(latent.value, rotated.value)
        return forced(value, torch.cat([latent.traced, rotated.traced], -1))

    @torch.no_grad()
    def _choose(self, at: str, x: Tensor, latent: Tensor) -> Tensor:
        s, ops, held = self._shape, self._ops, {n: one.value for n, one in self._weights.items()}
        positions = torch.arange(len(x))
        queries = ops.block_linear(latent, held[f"{at}wq_b.weight"]).unflatten(-1, (s.index_heads, s.index_dim))
        keys = ops.linear(x, held[f"{at}wk.weight"])
        keys = ops.layer_norm(keys, held[f"{at}k_norm.weight"], held[f"{at}k_norm.bias"], s.index_eps)
        keys = ops.rope(keys.unsqueeze(1), positions, self._table, True).squeeze(1)
        projected = ops.linear(x, held[f"{at}weights_proj.weight"])
        q, weights = ops.index_queries(ops.rope(queries, positions, self._table, True), projected)
        return ops.choose_keys(q, weights, ops.pack_index_keys(keys), positions + 1, s.index_top_k)

    def _mlp(self, at: str, x: Twice) -> Twice:
        pair = _joined(self._block(x, f"{at}gate_proj"), self._block(x, f"{at}up_proj"))
        return self._block(self._swiglu(pair), f"{at}down_proj")

    def _swiglu(self, pair: Twice) -> Twice:
        gate, up = pair.traced.chunk(2, -1)
        with torch.no_grad():
            value = self._ops.swiglu(pair.value)
        return forced(value, silu(gate) * up)

    def _sparse(self, at: str, x: Twice) -> Twice:
        s, ops = self._shape, self._ops
        choice, weights = self._route(f"{at}gate", x)
        rows = self._experts(at, x, choice)
        shared = self._mlp(f"{at}shared_experts.", x)
        with torch.no_grad():
            value = ops.combine(rows.value, weights.value, shared.value, s.factor)
        routed = (rows.traced * weights.traced.unsqueeze(-1)).sum(1)
        return forced(value, shared.traced + s.factor * routed)

    def _route(self, at: str, x: Twice) -> tuple[Tensor, Twice]:
        weight, bias = self._weights[f"{at}.weight"], self._weights[f"{at}.e_score_correction_bias"]
        with torch.no_grad():
            choice, value = self._ops.route(x.value, weight.value, bias.value, self._shape.experts_per_token)
        scores = (x.traced @ weight.traced.mT).sigmoid().gather(1, choice)
        return choice, forced(value, scores / (scores.sum(1, keepdim=True) + 1e-20))

    def _experts(self, at: str, x: Twice, choice: Tensor) -> Twice:
        """(T, k, H), differentiated at the unquantised fc1."""
        values = torch.zeros(*choice.shape, x.value.shape[1], dtype=x.value.dtype)
        traced = torch.zeros(values.shape, dtype=x.traced.dtype)
        for expert in range(self._shape.experts):  # one without tokens too, so that it has a gradient of zero
            tokens, slots = torch.where(choice == expert)
            mine, name = _rows(x, tokens), f"{at}experts.{expert}."
            with torch.no_grad():
                values[tokens, slots] = self._mlp(name, mine).value
            pair = _joined(self._linear(mine, f"{name}gate_proj"), self._linear(mine, f"{name}up_proj"))
            row = self._linear(self._swiglu(pair), f"{name}down_proj").traced
            traced = traced.index_put((tokens, slots), row)
        return forced(values, traced)


def _each(x: Twice, move: Callable[[Tensor], Tensor]) -> Twice:
    """A move of elements, of both."""
    return Twice(move(x.value), move(x.traced))


def _heads(x: Twice, heads: int) -> Twice:
    return Twice(x.value.unflatten(-1, (heads, -1)), x.traced.unflatten(-1, (heads, -1)))


def _rows(x: Twice, tokens: Tensor) -> Twice:
    return Twice(x.value[tokens], x.traced[tokens])


def _joined(first: Twice, second: Twice) -> Twice:
    return Twice(*(torch.cat(pair, -1) for pair in zip(_both(first), _both(second), strict=True)))


def _both(x: Twice) -> tuple[Tensor, Tensor]:
    return x.value, x.traced


def _added(x: Twice, stream: Twice) -> Twice:
    total = (x.value.float() + stream.value.float()).to(stream.value.dtype)
    return forced(total, x.traced + stream.traced)
