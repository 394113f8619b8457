"""Random models whose log-probs vary: weights of the scale that training gives, whatever the widths.

Under the usual initialisation a small model has nearly constant logits, and any two log-probs of it agree.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vime_core.data.byte_tokenizer import MOST, write_byte_tokenizer
from vime_core.data.optional import require

if TYPE_CHECKING:
    from torch import Tensor

LOGIT_SPREAD = 2.5
"""Standard deviation of the logits, about: an embedding or output row of H elements has norm `LOGIT_SPREAD`."""

Shapes = Mapping[str, tuple[int, ...]]


def write_random_model(directory: Path, config: Mapping[str, Any], shapes: Shapes, dtype: str, seed: int) -> Path:
    """A Hugging Face directory with random weights and a byte-level tokenizer.

    Args:
        directory: that does not exist yet.
        config: its ``config.json``, with ``vocab_size`` and ``max_position_embeddings``.
        shapes: of the weights, by name.
        dtype: ``bf16`` or ``fp32``.
        seed: of the weights.
    """
    torch = import_module("torch")
    directory.mkdir(parents=True)
    kind = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    weights = {name: tensor.to(kind) for name, tensor in random_weights(shapes, seed).items()}
    require("safetensors.torch").save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    names = {"bf16": "bfloat16", "fp32": "float32"}
    settings = {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0, "dtype": names[dtype], **config}
    (directory / "config.json").write_text(json.dumps(settings))
    vocabulary = min(int(config["vocab_size"]), MOST)
    write_byte_tokenizer(directory, vocabulary, int(config["max_position_embeddings"]))
    return directory


def random_weights(shapes: Shapes, seed: int) -> dict[str, Tensor]:
    """fp32 weights by name: norms ~ N(1, 0.1), biases ~ N(0, 0.1), matrices (N, K) ~ N(0, 1 / K), logits' wider."""
    torch = import_module("torch")
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * _scale(name, shape) + float("norm" in name)
        for name, shape in shapes.items()
    }


def _scale(name: str, shape: tuple[int, ...]) -> float:
    if len(shape) < 2:
        return 0.1
    return (LOGIT_SPREAD if "embed" in name or "lm_head" in name else 1.0) / math.sqrt(shape[-1])
