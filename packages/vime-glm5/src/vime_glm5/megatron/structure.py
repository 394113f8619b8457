"""GLM-5 as a structure of the Megatron trainer: sizes for Megatron, and weights by HF names, expert by expert."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from vime_core.errors import PolicyError
from vime_glm5.structure import Glm5Shape, read_shape, rope_theta
from vime_megatron.mapping import Rule, same, stacked
from vime_megatron.rope import Rope
from vime_megatron.structures.types import Blueprint

_ATTENTION: Final = {
    "linear_q_down_proj": "q_a_proj",
    "q_layernorm": "q_a_layernorm",
    "linear_q_up_proj": "q_b_proj",
    "linear_kv_down_proj": "kv_a_proj_with_mqa",
    "kv_layernorm": "kv_a_layernorm",
    "linear_kv_up_proj": "kv_b_proj",
    "linear_proj": "o_proj",
}
_INDEXER: Final = {
    "linear_wq_b.weight": "wq_b.weight",
    "linear_wk.weight": "wk.weight",
    "k_norm.weight": "k_norm.weight",
    "k_norm.bias": "k_norm.bias",
    "linear_weights_proj.weight": "weights_proj.weight",
}


@dataclass(frozen=True)
class Glm5Blueprint(Blueprint):
    """A `Blueprint` with the sizes that Megatron's configuration has no field for."""

    shape: Glm5Shape


class Glm5Structure:
    """See `vime_megatron.structures.types.Structure`."""

    def blueprint(self, config: Mapping[str, Any]) -> Glm5Blueprint:
        """Translate a ``config.json``. Raises PolicyError for what ``glm5/v1`` does not define."""
        shape = read_shape(config)
        transformer = {
            "num_layers": shape.layers,
            "hidden_size": shape.hidden,
            "ffn_hidden_size": shape.intermediate,
            "num_attention_heads": shape.heads,
            "num_query_groups": shape.heads,
            "kv_channels": shape.rotary,
            "layernorm_epsilon": shape.eps,
        }
        return Glm5Blueprint(
            transformer=transformer,
            block_spec=_no_local_spec,
            vocabulary=shape.vocabulary,
            context=shape.positions,
            head_dim=shape.rotary,
            tied=False,
            rope=Rope(rope_theta(config)),
            rules=tuple(rules(shape)),
            shape=shape,
        )


def _no_local_spec() -> Any:
    raise PolicyError(
        "GLM-5 trains under a contract only: alignment.contract is empty",
        remedy="Set alignment.contract = 'glm5/v1' or 'glm5/v1-bf16kv'.",
        code="VIME-ALIGN-073",
    )


def rules(shape: Glm5Shape) -> Iterator[Rule]:
    """The weight mapping, embedding first and output layer last."""
    yield same("embedding.word_embeddings.weight", "model.embed_tokens.weight")
    for layer in range(shape.layers):
        yield from _layer_rules(shape, layer)
    yield same("decoder.final_layernorm.weight", "model.norm.weight")
    yield same("output_layer.weight", "lm_head.weight")


def _layer_rules(shape: Glm5Shape, layer: int) -> Iterator[Rule]:
    target, source = f"decoder.layers.{layer}.", f"model.layers.{layer}."
    yield same(f"{target}input_layernorm.weight", f"{source}input_layernorm.weight")
    for ours, theirs in _ATTENTION.items():
        yield same(f"{target}self_attention.{ours}.weight", f"{source}self_attn.{theirs}.weight")
    if layer in shape.indexed_layers:
        for ours, theirs in _INDEXER.items():
            yield same(f"{target}self_attention.indexer.{ours}", f"{source}self_attn.indexer.{theirs}")
    yield same(f"{target}pre_mlp_layernorm.weight", f"{source}post_attention_layernorm.weight")
    mlp = _dense_rules if layer in shape.dense_layers else _sparse_rules(shape)
    yield from mlp(f"{target}mlp.", f"{source}mlp.")


def _dense_rules(target: str, source: str) -> Iterator[Rule]:
    pair = (f"{source}gate_proj.weight", f"{source}up_proj.weight")
    yield stacked(f"{target}linear_fc1.weight", pair)
    yield same(f"{target}linear_fc2.weight", f"{source}down_proj.weight")


def _sparse_rules(shape: Glm5Shape) -> Callable[[str, str], Iterator[Rule]]:
    def make(target: str, source: str) -> Iterator[Rule]:
        yield same(f"{target}router.weight", f"{source}gate.weight")
        yield same(f"{target}router.expert_bias", f"{source}gate.e_score_correction_bias")
        each = [f"{source}experts.{expert}." for expert in range(shape.experts)]
        yield _of_experts(f"{target}experts.linear_fc1.weight", each, ("gate_proj.weight", "up_proj.weight"))
        yield _of_experts(f"{target}experts.linear_fc2.weight", each, ("down_proj.weight",))
        yield from _dense_rules(f"{target}shared_experts.", f"{source}shared_experts.")

    return make


def _of_experts(target: str, experts: Sequence[str], parts: tuple[str, ...]) -> Rule:
    """One matrix an expert, [E, N, K], each of which stacks ``parts``."""

    def join(tensors: Sequence[Tensor]) -> Tensor:
        each = [tensors[first : first + len(parts)] for first in range(0, len(tensors), len(parts))]
        return torch.stack([torch.cat(list(pair)) for pair in each])

    def split(tensor: Tensor) -> Sequence[Tensor]:
        return [part for expert in tensor.unbind(0) for part in expert.chunk(len(parts))]

    return Rule(target, tuple(f"{expert}{part}" for expert in experts for part in parts), join, split)


STRUCTURE: Final = Glm5Structure()
