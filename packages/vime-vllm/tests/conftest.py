"""A tiny model of realistic scale, and rollouts over it with vime-core's own configuration objects."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from vime_core.backends import RolloutContext
from vime_core.config.schema import RunConfig
from vime_core.determinism.policy import REPRODUCIBLE, DeterminismPolicy
from vime_core.types import SampleRequest
from vime_vllm.options import VllmOptions
from vime_vllm.rollout import VllmRollout, open_rollout

settings.register_profile("vime", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("vime")
CONTEXT_LENGTH = 256
EOS = 2


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen2 in bf16 whose weights are large enough that log-probs vary, with a byte-level tokenizer."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    directory = tmp_path_factory.mktemp("tiny-qwen2")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=EOS,
    )
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            if name.endswith("bias"):
                parameter.normal_(0, 0.1)
    model.to(torch.bfloat16).save_pretrained(directory)
    _save_tokenizer(directory)
    return directory


def _save_tokenizer(directory: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.fixture(scope="session")
def weights(model_directory: Path) -> dict[str, Any]:
    """The model's weights by HF name, as the directory holds them."""
    from safetensors.torch import load_file

    return load_file(model_directory / "model.safetensors")


MakeConfig = Callable[..., RunConfig]


@pytest.fixture(scope="session")
def make_config() -> MakeConfig:
    """``make_config(options, **rollout)``: a run's configuration with a rollout section for the tiny model."""

    def make(options: VllmOptions | None = None, **rollout: Any) -> RunConfig:
        section = {"context_length": CONTEXT_LENGTH, "threads": 1, "timeout_s": 300.0, **rollout}
        return RunConfig.model_validate(
            {
                "run": {"seed": 7},
                "model": {},
                "data": {"source": "none"},
                "reward": {"name": "none"},
                "sampling": {"max_tokens": 32},
                "rollout": {**section, "plugin_options": {"vllm": options or VllmOptions()}},
                "trainer": {"threads": 1},
            }
        )

    return make


@pytest.fixture(scope="session")
def make_context(make_config: MakeConfig, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., RolloutContext]:
    """``make_context(options, policy, directory, **rollout)``: what `open_rollout` takes."""

    def make(
        options: VllmOptions | None = None,
        policy: DeterminismPolicy = REPRODUCIBLE,
        directory: Path = Path("/nonexistent"),
        **rollout: Any,
    ) -> RolloutContext:
        config = make_config(options, **rollout)
        return RolloutContext(config, config.options("rollout", "vllm"), policy, directory)

    return make


@pytest.fixture(scope="session")
def opened() -> Callable[[RolloutContext], AbstractContextManager[VllmRollout]]:
    """``with opened(context) as rollout``: a rollout that is closed whatever happens."""

    @contextmanager
    def manager(context: RolloutContext) -> Iterator[VllmRollout]:
        rollout = open_rollout(context)
        try:
            yield rollout
        finally:
            rollout.close()

    return manager


def make_requests(count: int = 6, **changes: Any) -> list[SampleRequest]:
    """Prompts of different lengths, two samples each, every request with a seed of its own."""
    return [
        SampleRequest(
            **{
                "prompt_index": number // 2,
                "sample_index": number % 2,
                "prompt_tokens": tuple(3 + (number // 2 * 37 + k * 11) % 200 for k in range(5 + 7 * (number // 2))),
                "seed": 1000 + number,
                "max_tokens": 24,
                **changes,
            }
        )
        for number in range(count)
    ]


@pytest.fixture(scope="session", name="make_requests")
def _make_requests() -> Callable[..., list[SampleRequest]]:
    return make_requests
