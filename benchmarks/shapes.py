"""Model directories of published shapes with random weights of a realistic scale, for benchmarks and verdicts.

    python benchmarks/shapes.py NAME DIRECTORY [LAYERS]

Names: Qwen2.5-0.5B, Qwen3-4B, SmolLM2-135M. The tokenizer is a byte-level one, whatever the vocabulary's size.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from vime_core.data.byte_tokenizer import MOST, write_byte_tokenizer

CONTEXT = 4096
SHAPES: dict[str, tuple[Any, dict[str, Any]]] = {
    "Qwen2.5-0.5B": (
        Qwen2Config,
        {"vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
         "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True},
    ),
    "Qwen3-4B": (
        Qwen3Config,
        {"vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
         "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True},
    ),
    "SmolLM2-135M": (
        LlamaConfig,
        {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
         "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True},
    ),
}  # fmt: skip


def write_model(name: str, directory: Path, layers: int | None = None) -> None:
    """Matrices ~ N(0, 9 / hidden size), norms ~ N(1, 0.01), in bf16: log-probs spread as a trained model's do."""
    kind, sizes = SHAPES[name]
    if layers is not None:
        sizes = {**sizes, "num_hidden_layers": layers}
    config = kind(**sizes, max_position_embeddings=CONTEXT, bos_token_id=None, eos_token_id=2, pad_token_id=0)
    config.architectures, config.dtype = [kind.__name__.replace("Config", "ForCausalLM")], "bfloat16"
    directory.mkdir(parents=True)
    config.save_pretrained(directory)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    scale = 3 * sizes["hidden_size"] ** -0.5

    def drawn(parameter: str, shape: torch.Size) -> torch.Tensor:
        noise = torch.randn(shape, generator=generator, device=device)
        return (1 + 0.1 * noise if "norm" in parameter else scale * noise).to("cpu", torch.bfloat16)

    weights = {parameter: drawn(parameter, tensor.shape) for parameter, tensor in model.named_parameters()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    write_byte_tokenizer(directory, MOST, CONTEXT)


if __name__ == "__main__":
    write_model(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else None)
