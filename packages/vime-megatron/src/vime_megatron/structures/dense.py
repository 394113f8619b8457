"""Dense decoders with grouped-query attention, RMSNorm and SwiGLU: Qwen2, Qwen3, Llama.

They differ in flags; the rest stands in the configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from vime_core.errors import ConfigError
from vime_core.plugins.types import load_attribute
from vime_megatron.mapping import Rule, grouped_qkv, same, stacked
from vime_megatron.rope import read_rope
from vime_megatron.structures.types import Blueprint

EXPECTED: Mapping[str, object] = {
    "hidden_act": "silu",
    "use_sliding_window": False,
}
"""Keys of a config.json with the only value that is built; an absent key has it."""


@dataclass(frozen=True)
class DenseStructure:
    """What the structures differ in.

    Args:
        qkv_bias: biases on query, key and value.
        qk_norm: RMSNorm on each head of query and key.
        output_bias: a bias on the attention's output projection.
        mlp_bias: biases on both linears of the MLP.
        switches: keys of a ``config.json`` that add biases (``attention_bias``: the first and the third of these,
            ``mlp_bias``). One that a structure does not know changes nothing, as in transformers.
    """

    qkv_bias: bool = False
    qk_norm: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    switches: tuple[str, ...] = ()

    def blueprint(self, config: Mapping[str, Any]) -> Blueprint:
        """See `vime_megatron.structures.types.Structure`."""
        _refuse_unexpected(config)
        heads = _integer(config, "num_attention_heads")
        groups = _integer(config, "num_key_value_heads", default=heads)
        head_dim = _integer(config, "head_dim", default=_integer(config, "hidden_size") // heads)
        layers = _integer(config, "num_hidden_layers")
        tied = bool(config.get("tie_word_embeddings", False))
        built = self._with_biases(config)
        transformer = {
            "num_layers": layers,
            "hidden_size": _integer(config, "hidden_size"),
            "ffn_hidden_size": _integer(config, "intermediate_size"),
            "num_attention_heads": heads,
            "num_query_groups": groups,
            "kv_channels": head_dim,
            "layernorm_epsilon": float(config["rms_norm_eps"]),
            "add_qkv_bias": built.qkv_bias,
            "qk_layernorm": self.qk_norm,
        }
        return Blueprint(
            transformer=transformer,
            block_spec=built.block_spec(layers, "vime_megatron.specs:LOCAL"),
            te_block_spec=built.block_spec(layers, "vime_megatron.te:ENGINE"),
            vocabulary=_integer(config, "vocab_size"),
            context=_integer(config, "max_position_embeddings"),
            head_dim=head_dim,
            tied=tied,
            rope=read_rope(config),
            rules=built.rules(layers, heads, groups, head_dim, tied=tied),
            output_bias=built.output_bias,
            mlp_bias=built.mlp_bias,
        )

    def _with_biases(self, config: Mapping[str, Any]) -> DenseStructure:
        attention, mlp = (key in self.switches and bool(config.get(key)) for key in ("attention_bias", "mlp_bias"))
        return replace(self, qkv_bias=self.qkv_bias or attention, output_bias=attention, mlp_bias=mlp)

    def rules(self, layers: int, heads: int, groups: int, head_dim: int, *, tied: bool) -> tuple[Rule, ...]:
        """The weight mapping, embedding first and output layer last."""
        rules = [same("embedding.word_embeddings.weight", "model.embed_tokens.weight")]
        for layer in range(layers):
            rules += self._layer_rules(f"decoder.layers.{layer}.", f"model.layers.{layer}.", (heads, groups, head_dim))
        rules.append(same("decoder.final_layernorm.weight", "model.norm.weight"))
        if not tied:
            rules.append(same("output_layer.weight", "lm_head.weight"))
        return tuple(rules)

    def _layer_rules(self, target: str, source: str, head_shape: tuple[int, int, int]) -> list[Rule]:
        rules = [same(f"{target}input_layernorm.weight", f"{source}input_layernorm.weight")]
        for part in _parts(self.qkv_bias):
            query, key, value = (f"{source}self_attn.{which}_proj.{part}" for which in "qkv")
            rules.append(grouped_qkv(f"{target}self_attention.linear_qkv.{part}", (query, key, value), *head_shape))
        rules += [
            same(f"{target}self_attention.{which}_layernorm.weight", f"{source}self_attn.{which}_norm.weight")
            for which in ("qk" if self.qk_norm else "")
        ]
        rules += [
            same(f"{target}self_attention.linear_proj.{part}", f"{source}self_attn.o_proj.{part}")
            for part in _parts(self.output_bias)
        ]
        rules.append(same(f"{target}pre_mlp_layernorm.weight", f"{source}post_attention_layernorm.weight"))
        for part in _parts(self.mlp_bias):
            gate_up = (f"{source}mlp.gate_proj.{part}", f"{source}mlp.up_proj.{part}")
            rules.append(stacked(f"{target}mlp.linear_fc1.{part}", gate_up))
            rules.append(same(f"{target}mlp.linear_fc2.{part}", f"{source}mlp.down_proj.{part}"))
        return rules

    def block_spec(self, layers: int, modules: str) -> Any:
        """What makes the layers of the modules that are named ``"module:attribute"``."""

        def make() -> Any:
            from vime_megatron.specs import dense_block_spec

            biases = {"output_bias": self.output_bias, "mlp_bias": self.mlp_bias}
            return dense_block_spec(layers, qk_norm=self.qk_norm, **biases, modules=load_attribute(modules, "megatron"))

        return make


QWEN2: Final = DenseStructure(qkv_bias=True)
QWEN3: Final = DenseStructure(qk_norm=True, switches=("attention_bias",))
LLAMA: Final = DenseStructure(switches=("attention_bias", "mlp_bias"))


def _parts(bias: bool) -> tuple[str, ...]:
    return ("weight", "bias") if bias else ("weight",)


def _integer(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise _unusable(f"config.json has {key} = {value!r}; a positive integer is needed")
    return value


def _refuse_unexpected(config: Mapping[str, Any]) -> None:
    for key, expected in EXPECTED.items():
        if config.get(key, expected) not in (expected, None):
            raise _unusable(f"config.json has {key} = {config[key]!r}; only {expected!r} is built")
    if not isinstance(config.get("rms_norm_eps"), float | int):
        raise _unusable(f"config.json has rms_norm_eps = {config.get('rms_norm_eps')!r}; a number is needed")
    if "sliding_attention" in (config.get("layer_types") or ()):
        raise _unusable("config.json has layer_types with 'sliding_attention'; only full attention is built")


def _unusable(message: str) -> ConfigError:
    return ConfigError(
        message,
        remedy="Use a model of this structure without that feature, or register a structure that builds it.",
        code="VIME-CONFIG-053",
    )
