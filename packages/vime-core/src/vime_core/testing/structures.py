"""Random small Qwen2, Qwen3 and Llama structures with settings of sampling: what nobody tuned a kernel to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from vime_core.data.byte_tokenizer import LEAST
from vime_core.data.optional import require
from vime_core.testing.models import Shapes, write_random_model

_T = TypeVar("_T")

POSITIONS: Final = 256
"""Of every structure; prompts of several pages fit."""

MODEL_TYPES: Final = ("qwen2", "qwen3", "llama")
DTYPES: Final = ("bf16", "fp32")
TEMPERATURES: Final = (0.0, 0.7, 1.0, 1.3)
_COMBINATIONS: Final = tuple(product(TEMPERATURES, DTYPES, MODEL_TYPES))
_LLAMA3: Final = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN: Final = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@dataclass(frozen=True)
class RandomStructure:
    """One random model: ``config`` is a ``config.json``, ``sampling`` keys of that section of a run."""

    seed: int
    dtype: str
    config: Mapping[str, Any]
    sampling: Mapping[str, float]

    def write(self, directory: Path) -> Path:
        """The model, in a directory that does not exist yet."""
        return write_random_model(directory, self.config, dense_shapes(self.config), self.dtype, self.seed)

    def __str__(self) -> str:
        named = {**self.config, "dtype": self.dtype, **self.sampling}
        return f"seed {self.seed}: " + ", ".join(f"{key} = {value}" for key, value in named.items())


def random_structure(seed: int) -> RandomStructure:
    """Structure number ``seed``. Consecutive ones go through all temperatures, dtypes and model types in turn."""
    temperature, dtype, kind = _COMBINATIONS[seed % len(_COMBINATIONS)]
    draw = np.random.default_rng(seed)

    def one_of(*values: _T) -> _T:
        return values[int(draw.integers(len(values)))]

    groups = one_of(1, 2, 3)
    heads = groups * one_of(1, 2, 3)
    rope = one_of({"rope_type": "default"}, {"rope_type": "linear", "factor": 2.5}, _LLAMA3, _YARN)
    config: dict[str, Any] = {
        "model_type": kind,
        "architectures": [{"qwen2": "Qwen2", "qwen3": "Qwen3", "llama": "Llama"}[kind] + "ForCausalLM"],
        "num_hidden_layers": one_of(1, 2, 3, 4),
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": one_of(32, 64, 128),
        "hidden_size": heads * one_of(13, 16, 30),  # transformers wants a multiple
        "intermediate_size": int(draw.integers(33, 200)),
        "vocab_size": int(draw.integers(LEAST, 600)),
        "rms_norm_eps": one_of(1e-5, 1e-6),
        "hidden_act": "silu",
        "tie_word_embeddings": one_of(True, False),
        "max_position_embeddings": POSITIONS,
        "rope_parameters": {**rope, "rope_theta": one_of(1e4, 5e5, 1e6)},
        "attention_bias": one_of(True, False),
        "mlp_bias": one_of(True, False),
    }
    cut = one_of({}, {"top_p": 0.9}, {"top_k": 20}, {"top_k": 40, "top_p": 0.7})
    return RandomStructure(seed, dtype, config, {"temperature": temperature, **cut})


def dense_shapes(config: Mapping[str, Any]) -> Shapes:
    """The weights of a configuration that transformers knows, by name, without making them."""
    torch, transformers = import_module("torch"), require("transformers")
    given = {key: value for key, value in config.items() if key != "model_type"}
    known = transformers.AutoConfig.for_model(config["model_type"], **given)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(known)
    return {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
