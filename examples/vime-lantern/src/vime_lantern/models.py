"""Small random Lanterns with log-probs that vary."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from vime_core.testing.models import write_random_model

SHAPES: Final = (
    {"hidden_size": 96, "intermediate_size": 200, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
    {"hidden_size": 65, "intermediate_size": 133, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 64},
)


def write(directory: Path, dtype: str, seed: int) -> None:
    """A model of one of `SHAPES` in a directory that does not exist yet."""
    sizes = SHAPES[seed % len(SHAPES)]
    config: dict[str, Any] = {
        "model_type": "lantern",
        "architectures": ["LanternForCausalLM"],
        "vocab_size": 509,
        "num_hidden_layers": 3,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "window": 21,
        "score_cap": 9.0,
        "logit_cap": 12.0,
        **sizes,
    }
    write_random_model(directory, config, _shapes(config), dtype, seed)


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, size, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    norms = ("input_layernorm", "after_attention_norm", "post_attention_layernorm", "after_mlp_norm")
    layer = {
        **{f"{name}.weight": (hidden,) for name in norms},
        "self_attn.q_proj.weight": (heads, hidden),
        "self_attn.k_proj.weight": (kv_heads, hidden),
        "self_attn.v_proj.weight": (kv_heads, hidden),
        "self_attn.o_proj.weight": (hidden, heads),
        "mlp.gate_proj.weight": (size, hidden),
        "mlp.up_proj.weight": (size, hidden),
        "mlp.down_proj.weight": (hidden, size),
    }
    layers = {f"model.layers.{n}.{k}": v for n in range(config["num_hidden_layers"]) for k, v in layer.items()}
    return {"model.embed_tokens.weight": (config["vocab_size"], hidden), **layers, "model.norm.weight": (hidden,)}
