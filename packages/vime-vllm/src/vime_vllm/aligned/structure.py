"""The dense decoder of a configuration: Qwen2, Qwen3, Llama, and what of them ``dense/v1`` does not cover."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from vime_core.errors import PolicyError
from vime_core.numerics import RopeScaling, rope_scaling


@dataclass(frozen=True)
class DenseStructure:
    """Sizes and switches of a dense decoder; ``positions`` is how far its rotary table reaches."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    positions: int
    eps: float
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    theta: float
    scaling: RopeScaling


def dense_structure(config: Any, like: str = "") -> DenseStructure:
    """The structure of a Hugging Face configuration object.

    Args:
        config: the object.
        like: the ``model_type`` that it is built as, for a structure of another name; empty: its own.

    Raises:
        PolicyError: something in it has no definition in ``dense/v1``; the message names field and value.
    """
    kind = like or config.model_type
    if kind not in ("qwen2", "qwen3", "llama"):
        raise _refused("model_type", kind)
    _refuse_features(config)
    theta, scaling = rope_scaling(_rope_parameters(config), config.max_position_embeddings)
    attention_bias = bool(getattr(config, "attention_bias", False))
    return DenseStructure(
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        intermediate=config.intermediate_size,
        vocabulary=config.vocab_size,
        positions=config.max_position_embeddings,
        eps=config.rms_norm_eps,
        tied=bool(config.tie_word_embeddings),
        qkv_bias=kind == "qwen2" or attention_bias,  # Qwen2 has these three always and no switch
        o_bias=kind != "qwen2" and attention_bias,
        mlp_bias=kind == "llama" and bool(getattr(config, "mlp_bias", False)),
        qk_norm=kind == "qwen3",
        theta=theta,
        scaling=scaling,
    )


def _refuse_features(config: Any) -> None:
    if getattr(config, "use_sliding_window", False):
        raise _refused("use_sliding_window", True)
    other = [kind for kind in getattr(config, "layer_types", None) or () if kind != "full_attention"]
    if other:
        raise _refused("layer_types", other[0])
    if config.hidden_act != "silu":
        raise _refused("hidden_act", config.hidden_act)
    if getattr(config, "quantization_config", None):
        raise _refused("quantization_config", "...")


def _rope_parameters(config: Any) -> Mapping[str, object]:
    """``rope_parameters`` of transformers 5, or what came before."""
    given = cast("Mapping[str, object] | None", getattr(config, "rope_parameters", None))
    older = cast("Mapping[str, object] | None", getattr(config, "rope_scaling", None)) or {}
    parameters = {**older, **(given or {})}
    theta = getattr(config, "rope_theta", None)
    return parameters if "rope_theta" in parameters or theta is None else {**parameters, "rope_theta": theta}


def _refused(field: str, value: object) -> PolicyError:
    return PolicyError(
        f"the model's {field} = {value!r} has no definition in dense/v1",
        remedy="Take a model without it, or a contract that covers it (vime_aligned_sides).",
        code="VIME-ALIGN-026",
    )
