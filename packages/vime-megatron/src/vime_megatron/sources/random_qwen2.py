"""Model source ``random-qwen2``: a tiny random Qwen2, the same bits from the same options.

Its weights have the scale of a trained model's, so that log-probs vary: the logits of a small model under the usual
initialisation (0.02) are nearly constant, and then every comparison of log-probs holds.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, model_validator

from vime_core.config.schema import NonNegativeInt, PositiveInt
from vime_core.data.byte_tokenizer import LEAST, MOST, write_byte_tokenizer
from vime_core.plugins.types import Options
from vime_megatron.requirement import require_transformers
from vime_megatron.sources.cache import cache_key, make_once

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = 1
"""Raise it whenever the same options give other bits."""


class RandomQwen2Options(Options):
    """The ``[model.random-qwen2]`` section."""

    seed: NonNegativeInt = Field(0, lt=2**64)
    layers: PositiveInt = 3
    hidden: PositiveInt = Field(256, description="Width of the residual stream; an even multiple of heads.")
    intermediate: PositiveInt = 512
    heads: PositiveInt = 4
    key_value_heads: PositiveInt = Field(2, description="Divides heads.")
    vocabulary: int = Field(512, ge=LEAST, description="Tokens of the model; its tokenizer knows at most 939 of them.")
    context: PositiveInt = Field(1024, description="max_position_embeddings.")
    tied: bool = Field(True, description="One matrix for embedding and output layer.")

    @model_validator(mode="after")
    def _divisible(self) -> RandomQwen2Options:
        if self.hidden % (2 * self.heads):
            raise ValueError(
                f"model.random-qwen2.hidden = {self.hidden} is no multiple of 2 x heads = {2 * self.heads}"
            )
        if self.heads % self.key_value_heads:
            raise ValueError(f"heads = {self.heads} is no multiple of key_value_heads = {self.key_value_heads}")
        return self


def make_random_qwen2(options: RandomQwen2Options, cache_dir: Path) -> Path:
    """The model's directory in the cache, made when it is not there.

    Raises:
        PluginError: transformers is absent.
    """
    key = cache_key({"format": FORMAT, **options.model_dump()})
    require_transformers("model.source = 'random-qwen2'", "megatron")
    place = cache_dir.expanduser() / "random-qwen2" / key
    return make_once(place, lambda directory: _write(options, directory))


def _write(options: RandomQwen2Options, directory: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, Qwen2Config

    config = Qwen2Config(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        intermediate_size=options.intermediate,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.key_value_heads,
        max_position_embeddings=options.context,
        tie_word_embeddings=options.tied,
        architectures=["Qwen2ForCausalLM"],
        dtype="bfloat16",
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    directory.mkdir()
    config.save_pretrained(directory)
    causal_lm: Any = AutoModelForCausalLM
    with torch.device("meta"):  # names and shapes only: the weights below depend on no library's initialisation
        model = causal_lm.from_config(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    save_file(dict(_weights(shapes, options.seed)), directory / "model.safetensors", metadata={"format": "pt"})
    write_byte_tokenizer(directory, min(options.vocabulary, MOST), options.context)


def _weights(shapes: dict[str, tuple[int, ...]], seed: int) -> Iterator[tuple[str, Tensor]]:
    """Matrices and biases ~ N(0, 0.1), norm weights ~ N(1, 0.1), in bf16."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    for name, shape in shapes.items():
        tensor = 0.1 * torch.randn(shape, generator=generator)
        yield name, (tensor + 1 if "norm" in name else tensor).to(torch.bfloat16)
