"""The sizes of a GLM-5 model as both sides read them from its ``config.json``, and what of it is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from vime_core.errors import PolicyError

MODEL_TYPE: Final = "glm_moe_dsa"
_EXPECTED: Final[Mapping[str, object]] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "indexer_rope_interleave": True,
    "rope_interleave": True,
    "n_shared_experts": 1,
}
"""Keys with the only value that glm5/v1 defines; an absent key has it."""


@dataclass(frozen=True)
class Glm5Shape:
    """Sizes of a model; names follow ``config.json``, layers count from 0.

    Args:
        dense_layers: which layers have a dense MLP; the others route to experts.
        indexed_layers: which layers choose keys; the others reuse the choice of the last one before them.
        index_eps: of the LayerNorm of index keys.
        scale: of the attention scores.
    """

    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    positions: int
    eps: float
    heads: int
    q_lora: int
    kv_lora: int
    nope: int
    rotary: int
    value: int
    experts: int
    experts_per_token: int
    expert_intermediate: int
    factor: float
    index_heads: int
    index_dim: int
    index_top_k: int
    dense_layers: frozenset[int]
    indexed_layers: tuple[int, ...]
    index_eps: float
    scale: float

    @property
    def key_dim(self) -> int:
        """Elements of a cached key: latent and rotated part."""
        return self.kv_lora + self.rotary

    def choosing_layer(self, layer: int) -> int:
        """The layer whose choice of keys ``layer`` uses: itself or an earlier one."""
        return max(one for one in self.indexed_layers if one <= layer)


def read_shape(config: Mapping[str, Any]) -> Glm5Shape:
    """The shape of a ``config.json``.

    Raises:
        PolicyError: a key is absent or has a value that ``glm5/v1`` does not define; names key and value.
    """
    _refuse_unexpected(config)
    nope, rotary = _integer(config, "qk_nope_head_dim"), _integer(config, "qk_rope_head_dim")
    layers = _integer(config, "num_hidden_layers")
    _refuse_sizes(config)
    return Glm5Shape(
        layers=layers,
        hidden=_integer(config, "hidden_size"),
        intermediate=_integer(config, "intermediate_size"),
        vocabulary=_integer(config, "vocab_size"),
        positions=_integer(config, "max_position_embeddings"),
        eps=_number(config, "rms_norm_eps"),
        heads=_integer(config, "num_attention_heads"),
        q_lora=_integer(config, "q_lora_rank"),
        kv_lora=_integer(config, "kv_lora_rank"),
        nope=nope,
        rotary=rotary,
        value=_integer(config, "v_head_dim"),
        experts=_integer(config, "n_routed_experts"),
        experts_per_token=_integer(config, "num_experts_per_tok"),
        expert_intermediate=_integer(config, "moe_intermediate_size"),
        factor=_number(config, "routed_scaling_factor"),
        index_heads=_integer(config, "index_n_heads"),
        index_dim=_integer(config, "index_head_dim"),
        index_top_k=_integer(config, "index_topk"),
        dense_layers=frozenset(_dense_layers(config, layers)),
        indexed_layers=_indexed_layers(config, layers),
        index_eps=1e-6,
        scale=(nope + rotary) ** -0.5,
    )


def _refuse_sizes(config: Mapping[str, Any]) -> None:
    """Sizes that do not fit one another."""
    chosen, experts = _integer(config, "num_experts_per_tok"), _integer(config, "n_routed_experts")
    if chosen > experts:
        raise _refused("num_experts_per_tok", chosen, f"n_routed_experts = {experts} is less")
    rotary, index = _integer(config, "qk_rope_head_dim"), _integer(config, "index_head_dim")
    if rotary % 2:
        raise _refused("qk_rope_head_dim", rotary, "pairs of elements are rotated")
    if rotary > index:
        raise _refused("qk_rope_head_dim", rotary, f"index_head_dim = {index} is less, and its first elements rotate")


def _kinds(config: Mapping[str, Any], key: str, layers: int, known: Sequence[str]) -> Sequence[str] | None:
    """One kind a layer, or None where the model does not list them."""
    kinds: object = config.get(key)
    if kinds is None:
        return None
    found = cast("Sequence[object]", kinds) if isinstance(kinds, list | tuple) else ()
    if len(found) != layers or any(kind not in known for kind in found):
        raise _refused(
            key, list(found) or str(cast("object", kinds)), f"{layers} of {', '.join(known)} are needed, one a layer"
        )
    return cast("Sequence[str]", found)


def _dense_layers(config: Mapping[str, Any], layers: int) -> list[int]:
    kinds = _kinds(config, "mlp_layer_types", layers, ("dense", "sparse"))
    if kinds is None:
        return list(range(min(layers, _integer(config, "first_k_dense_replace"))))
    return [layer for layer, kind in enumerate(kinds) if kind == "dense"]


def _indexed_layers(config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """From the list of kinds, or the frequency and offset of GLM-5.2; the first layer always chooses."""
    kinds = _kinds(config, "indexer_types", layers, ("full", "shared"))
    if kinds is None:
        every = max(_integer({"index_topk_freq": 1, **config}, "index_topk_freq", least=0), 1)
        offset = _integer({"index_skip_topk_offset": 2, **config}, "index_skip_topk_offset", least=0)
        chosen = [layer for layer in range(layers) if max(layer - offset + 1, 0) % every == 0]
    else:
        chosen = [layer for layer, kind in enumerate(kinds) if kind == "full"]
    if not chosen or chosen[0] != 0:
        raise _refused("indexer_types", kinds, "the first layer must choose keys")
    return tuple(chosen)


def _refuse_unexpected(config: Mapping[str, Any]) -> None:
    for key, expected in _EXPECTED.items():
        if config.get(key, expected) not in (expected, None):
            raise _refused(key, config[key], f"only {expected!r} is defined")
    if (kind := config.get("model_type")) != MODEL_TYPE:
        raise _refused("model_type", kind, f"only {MODEL_TYPE!r} is defined")
    if config.get("quantization_config"):
        raise _refused("quantization_config", "...", "masters are bf16; the contract quantises them itself")
    if _rope(config).get("rope_type", "default") != "default":
        raise _refused("rope_type", _rope(config)["rope_type"], "only 'default' is defined")


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    given: Mapping[str, Any] | None = config.get("rope_parameters") or config.get("rope_scaling")
    return given or {}


def rope_theta(config: Mapping[str, Any]) -> float:
    """Base of the rotary embedding."""
    return float(_rope(config).get("rope_theta", config.get("rope_theta", 1e6)))


def _integer(config: Mapping[str, Any], key: str, least: int = 1) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise _refused(key, value, f"an integer of at least {least} is needed")
    return value


def _number(config: Mapping[str, Any], key: str) -> float:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _refused(key, value, "a number is needed")
    return float(value)


def _refused(key: str, value: object, why: str) -> PolicyError:
    return PolicyError(
        f"the model's {key} = {value!r} has no definition in glm5/v1: {why}",
        remedy="Take a GLM-5 model without it; FP8 checkpoints are dequantised to bf16 first.",
        code="VIME-ALIGN-071",
    )
