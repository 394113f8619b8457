"""Model source ``random-glm5``: a tiny random GLM-5, the same bits from the same options.

Its weights have the scale of a trained model's, so that log-probs vary, routers differ and indexers choose.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, model_validator

from vime_core.config.schema import NonNegativeInt, PositiveInt
from vime_core.data.byte_tokenizer import write_byte_tokenizer
from vime_core.plugins.types import Options
from vime_glm5.structure import MODEL_TYPE, Glm5Shape, read_shape
from vime_megatron.requirement import require_transformers
from vime_megatron.sources.cache import cache_key, make_once

if TYPE_CHECKING:
    from torch import Tensor

INDEX_DIM = 128
FORMAT = 1
"""Raise it whenever the same options give other bits."""


class RandomGlm5Options(Options):
    """The ``[model.random-glm5]`` section."""

    seed: NonNegativeInt = Field(0, lt=2**64)
    layers: PositiveInt = Field(6, description="Decoder layers.")
    dense_layers: PositiveInt = Field(3, description="So many of them, from the first, have a dense MLP.")
    hidden: PositiveInt = Field(192, description="Width of the residual stream.")
    intermediate: PositiveInt = 256
    heads: PositiveInt = 4
    q_lora: PositiveInt = Field(160, description="q_lora_rank.")
    kv_lora: PositiveInt = Field(512, description="kv_lora_rank; a multiple of 128 for an FP8 KV cache.")
    nope: PositiveInt = Field(64, description="qk_nope_head_dim.")
    rotary: PositiveInt = Field(64, description="qk_rope_head_dim; even.")
    value: PositiveInt = Field(64, description="v_head_dim.")
    experts: PositiveInt = Field(8, description="n_routed_experts.")
    experts_per_token: PositiveInt = 3
    expert_intermediate: PositiveInt = Field(96, description="moe_intermediate_size.")
    index_heads: PositiveInt = Field(2, description="index_n_heads.")
    index_top_k: PositiveInt = Field(32, description="index_topk: how many keys a token attends to at most.")
    index_frequency: PositiveInt = Field(4, description="index_topk_freq: every so many layers choose keys.")
    index_offset: PositiveInt = Field(3, description="index_skip_topk_offset.")
    vocabulary: int = Field(512, ge=259, le=935)
    context: PositiveInt = Field(1024, description="max_position_embeddings.")

    @model_validator(mode="after")
    def _sizes_fit(self) -> RandomGlm5Options:
        if self.experts_per_token > self.experts:
            raise ValueError(
                f"model.random-glm5.experts_per_token = {self.experts_per_token} is more than model.random-glm5.experts"
                f" = {self.experts}"
            )
        if self.rotary % 2 or self.rotary > INDEX_DIM:
            raise ValueError(f"model.random-glm5.rotary = {self.rotary} is not even and at most {INDEX_DIM}")
        return self


def make_random_glm5(options: RandomGlm5Options, cache_dir: Path) -> Path:
    """The model's directory in the cache, made when it is not there.

    Raises:
        PluginError: transformers is absent.
    """
    key = cache_key({"format": FORMAT, **options.model_dump()})
    require_transformers("model.source = 'random-glm5'", "megatron")
    place = cache_dir.expanduser() / "random-glm5" / key
    return make_once(place, lambda directory: _write(options, directory))


def configuration(options: RandomGlm5Options) -> dict[str, Any]:
    """The model's ``config.json``."""
    return {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": MODEL_TYPE,
        "dtype": "bfloat16",
        "vocab_size": options.vocabulary,
        "hidden_size": options.hidden,
        "intermediate_size": options.intermediate,
        "moe_intermediate_size": options.expert_intermediate,
        "num_hidden_layers": options.layers,
        "first_k_dense_replace": min(options.dense_layers, options.layers),
        "num_attention_heads": options.heads,
        "num_key_value_heads": options.heads,
        "n_shared_experts": 1,
        "n_routed_experts": options.experts,
        "num_experts_per_tok": options.experts_per_token,
        "routed_scaling_factor": 2.5,
        "kv_lora_rank": options.kv_lora,
        "q_lora_rank": options.q_lora,
        "qk_rope_head_dim": options.rotary,
        "qk_nope_head_dim": options.nope,
        "v_head_dim": options.value,
        "head_dim": options.rotary,
        "index_topk": options.index_top_k,
        "index_head_dim": INDEX_DIM,
        "index_n_heads": options.index_heads,
        "index_topk_freq": options.index_frequency,
        "index_skip_topk_offset": options.index_offset,
        "max_position_embeddings": options.context,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "indexer_rope_interleave": True,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }


def _write(options: RandomGlm5Options, directory: Path) -> None:
    from safetensors.torch import save_file

    config = configuration(options)
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    weights = dict(random_weights(weight_shapes(read_shape(config)), options.seed))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    write_byte_tokenizer(directory, options.vocabulary, options.context)


def weight_shapes(shape: Glm5Shape) -> dict[str, tuple[int, ...]]:
    """Shape of every weight by HF name, in the order of layers."""
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocabulary, shape.hidden)}
    for layer in range(shape.layers):
        at = f"model.layers.{layer}."
        found[f"{at}input_layernorm.weight"] = (shape.hidden,)
        found |= {f"{at}self_attn.{name}": size for name, size in _attention_shapes(shape).items()}
        if layer in shape.indexed_layers:
            found |= {f"{at}self_attn.indexer.{name}": size for name, size in _indexer_shapes(shape).items()}
        found[f"{at}post_attention_layernorm.weight"] = (shape.hidden,)
        mlp = _mlp_shapes("", shape, shape.intermediate) if layer in shape.dense_layers else _sparse_shapes(shape)
        found |= {f"{at}mlp.{name}": size for name, size in mlp.items()}
    return found | {"model.norm.weight": (shape.hidden,), "lm_head.weight": (shape.vocabulary, shape.hidden)}


def _attention_shapes(s: Glm5Shape) -> dict[str, tuple[int, ...]]:
    return {
        "q_a_proj.weight": (s.q_lora, s.hidden),
        "q_a_layernorm.weight": (s.q_lora,),
        "q_b_proj.weight": (s.heads * (s.nope + s.rotary), s.q_lora),
        "kv_a_proj_with_mqa.weight": (s.key_dim, s.hidden),
        "kv_a_layernorm.weight": (s.kv_lora,),
        "kv_b_proj.weight": (s.heads * (s.nope + s.value), s.kv_lora),
        "o_proj.weight": (s.hidden, s.heads * s.value),
    }


def _indexer_shapes(s: Glm5Shape) -> dict[str, tuple[int, ...]]:
    return {
        "wq_b.weight": (s.index_heads * s.index_dim, s.q_lora),
        "wk.weight": (s.index_dim, s.hidden),
        "k_norm.weight": (s.index_dim,),
        "k_norm.bias": (s.index_dim,),
        "weights_proj.weight": (s.index_heads, s.hidden),
    }


def _mlp_shapes(prefix: str, s: Glm5Shape, intermediate: int) -> dict[str, tuple[int, ...]]:
    wide, narrow = (intermediate, s.hidden), (s.hidden, intermediate)
    return {
        f"{prefix}gate_proj.weight": wide,
        f"{prefix}up_proj.weight": wide,
        f"{prefix}down_proj.weight": narrow,
    }


def _sparse_shapes(s: Glm5Shape) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {
        "gate.weight": (s.experts, s.hidden),
        "gate.e_score_correction_bias": (s.experts,),
    }
    for expert in range(s.experts):
        found |= _mlp_shapes(f"experts.{expert}.", s, s.expert_intermediate)
    return found | _mlp_shapes("shared_experts.", s, s.expert_intermediate)


def random_weights(shapes: Mapping[str, tuple[int, ...]], seed: int) -> Iterator[tuple[str, Tensor]]:
    """Matrices ~ N(0, 1.5 / K) and norms ~ N(1, 0.1) in bf16; the routers' biases ~ N(0, 0.1) in fp32."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    for name, shape in shapes.items():
        drawn = torch.randn(shape, generator=generator)
        if name.endswith("e_score_correction_bias"):
            yield name, 0.1 * drawn
        elif len(shape) == 1:
            yield name, (0.1 * drawn + float(name.endswith("weight"))).to(torch.bfloat16)
        else:
            yield name, (drawn * (1.5 / shape[1]) ** 0.5).to(torch.bfloat16)
