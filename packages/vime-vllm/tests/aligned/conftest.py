"""Random models of three structures, of realistic scale, and aligned rollouts over them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from vime_core.alignment import Alignment
from vime_core.backends import RolloutContext
from vime_core.config.schema import RunConfig
from vime_core.determinism.policy import REPRODUCIBLE
from vime_core.numerics import DENSE_V1
from vime_core.types import SampleRequest
from vime_vllm.options import VllmOptions

sys.path.insert(0, str(Path(__file__).parent / "support"))

SIDE = "vime_vllm.aligned.model:AlignedDecoder"
BLOCK = 16


@dataclass(frozen=True)
class Shape:
    """One random model: structure, dtype of training, and what differs from the common configuration."""

    kind: str
    dtype: str
    changes: dict[str, Any] = field(default_factory=dict)


SHAPES = {
    "qwen3-bf16": Shape("qwen3", "bf16", {"head_dim": 64, "tie_word_embeddings": True}),
    "llama-fp32": Shape(
        "llama",
        "fp32",
        {
            "hidden_size": 96,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "head_dim": 32,
            "intermediate_size": 203,
            "vocab_size": 517,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "qwen2-bf16": Shape("qwen2", "bf16", {"num_key_value_heads": 1, "num_hidden_layers": 3}),
}
_COMMON: dict[str, Any] = {
    "vocab_size": 1001,
    "hidden_size": 128,
    "intermediate_size": 344,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": 2,
}


def make_model(shape: Shape, directory: Path) -> None:
    """Write a random model and a byte-level tokenizer, with norms and biases that matter."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(shape.kind, **{**_COMMON, **shape.changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            if name.endswith("bias"):
                parameter.normal_(0, 0.1)
    model.to({"bf16": torch.bfloat16, "fp32": torch.float32}[shape.dtype]).save_pretrained(directory)
    write_tokenizer(directory)


def write_tokenizer(directory: Path) -> None:
    from tokenizers import Tokenizer, models

    Tokenizer(models.BPE(vocab={"<|end|>": 0, "<|pad|>": 1, "<|stop|>": 2}, merges=[])).save(
        str(directory / "tokenizer.json")
    )
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|stop|>", "pad_token": "<|pad|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


MakeAligned = Callable[..., RolloutContext]


@pytest.fixture(scope="session")
def make_aligned(make_config: Callable[..., RunConfig]) -> MakeAligned:
    """``make_aligned(directory, dtype, side, **engine_args)``: what `open_rollout` takes."""

    def make(
        directory: Path = Path("/nonexistent"),
        dtype: str = "bf16",
        side: str = SIDE,
        options: VllmOptions | None = None,
        sampling: dict[str, Any] | None = None,
    ) -> RolloutContext:
        options = options or VllmOptions(kv_cache_gib=0.02, engine_args={"block_size": BLOCK})
        config = make_config(options)
        config = config.model_copy(
            update={
                "trainer": config.trainer.model_copy(update={"dtype": dtype}),
                "sampling": config.sampling.model_copy(update=sampling or {}),
            }
        )
        alignment = Alignment(DENSE_V1, "cpu", "nobody:nothing", side)
        return RolloutContext(config, options, REPRODUCIBLE, directory, alignment)

    return make


def requests_of(count: int, vocabulary: int, **changes: Any) -> list[SampleRequest]:
    """Prompts from one token to several pages; every third begins with a common prefix; temperatures in turn."""
    common = [3 + (k * 7919) % (vocabulary - 3) for k in range(3 * BLOCK + 5)]
    made: list[SampleRequest] = []
    for number in range(count):
        own = [3 + (number * 131 + k * 977) % (vocabulary - 3) for k in range(1 + (number * 13) % 60)]
        prompt = common + own if number % 3 == 0 else own
        settings = {
            "prompt_index": number,
            "sample_index": 0,
            "prompt_tokens": tuple(prompt),
            "seed": 5000 + number,
            "max_tokens": 28,
            "temperature": (1.0, 0.0, 0.7, 1.3)[number % 4],
        }
        made.append(SampleRequest(**{**settings, **changes}))
    return made


@pytest.fixture(scope="session", name="requests_of")
def _requests_of() -> Callable[..., list[SampleRequest]]:
    return requests_of


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``model_of("qwen3-bf16")``: the directory of a random model, made once."""
    made: dict[str, Path] = {}

    def find(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            make_model(SHAPES[name], made[name])
        return made[name]

    return find


@pytest.fixture(scope="session")
def shapes() -> dict[str, Shape]:
    return SHAPES


@pytest.fixture(scope="session", name="write_tokenizer")
def _write_tokenizer() -> Callable[[Path], None]:
    return write_tokenizer
