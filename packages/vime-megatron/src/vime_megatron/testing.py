"""For tests of trainers and structures: tiny models of realistic scale, sequences, configurations, comparisons.

A model under the usual initialisation has nearly constant logits, and any two of its log-probs agree; these have not.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vime_core.backends import LossFunction, NamedTensors
from vime_core.config.schema import RunConfig
from vime_core.rl.losses import PpoClipOptions, ppo_clip
from vime_core.types import Float32Array, TrainSequence

VOCABULARY = 96
SHAPE: Mapping[str, int] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
PPO: LossFunction = partial(ppo_clip, options=PpoClipOptions.model_validate({}))


class Observed:
    """A `vime_core.backends.StateObserver` that keeps copies."""

    def __init__(self) -> None:
        self.seen: dict[str, Tensor] = {}

    def gradients(self, tensors: NamedTensors) -> None:
        """Keep a copy of each tensor."""
        self.seen = snapshot(tensors)


def hf_model(model_type: str, seed: int = 0, **changes: Any) -> Any:
    """A random transformers model in fp32: matrices and biases ~ N(0, 0.1), norm weights ~ N(1, 0.1)."""
    from transformers import AutoConfig, AutoModelForCausalLM

    causal_lm: Any = AutoModelForCausalLM
    config = AutoConfig.for_model(model_type, **{**SHAPE, **changes})
    model = causal_lm.from_config(config, attn_implementation="eager").float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator) + float("norm" in name))
    return model


def hf_log_probs(model: Any, sequence: TrainSequence, temperature: float = 1.0) -> Tensor:
    """Log-probs of the response of one sequence alone, fp64 [R], with gradients: the independent reference."""
    logits = model(torch.tensor([sequence.tokens])).logits[0].double() / (temperature or 1.0)
    rows = logits.log_softmax(-1)[sequence.response_start - 1 : -1]
    return rows.gather(-1, torch.tensor(sequence.tokens[sequence.response_start :])[:, None])[:, 0]


def run_config(temperature: float = 1.0, modules: tuple[str, ...] = (), **trainer: Any) -> RunConfig:
    """A configuration with one CPU thread, fp32 and ``trainer`` over it."""
    return RunConfig.model_validate(
        {
            "run": {},
            "model": {},
            "data": {"source": "none"},
            "reward": {"name": "none"},
            "sampling": {"temperature": temperature, "max_tokens": 16},
            "rollout": {"context_length": 128},
            "trainer": {"dtype": "fp32", "threads": 1, "lr": 1e-3, **trainer},
            "plugins": {"modules": modules},
        }
    )


def random_sequences(
    lengths: Sequence[tuple[int, int]],
    seed: int = 0,
    vocabulary: int = VOCABULARY,
    old_log_probs: Sequence[Float32Array] | None = None,
) -> list[TrainSequence]:
    """Random sequences of (prompt, response) lengths; the weights of all response tokens sum to one."""
    generator = np.random.default_rng(seed)
    total = sum(response for _, response in lengths)
    return [
        TrainSequence(
            key=(i, 0),
            tokens=tuple(int(token) for token in generator.integers(0, vocabulary, prompt + response)),
            response_start=prompt,
            advantages=generator.normal(size=response).astype(np.float32),
            weights=np.full(response, 1.0 / total, np.float32),
            old_log_probs=old_log_probs[i] if old_log_probs is not None else None,
        )
        for i, (prompt, response) in enumerate(lengths)
    ]


def snapshot(tensors: NamedTensors) -> dict[str, Tensor]:
    """Copies, by name."""
    return {name: tensor.detach().clone() for name, tensor in tensors}


def unequal(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> list[str]:
    """Names whose bits differ; a name that one side lacks differs, and so does NaN.

    Raises:
        ValueError: there is nothing to compare.
    """
    names = [*first, *(name for name in second if name not in first)]
    if not names:
        raise ValueError("nothing to compare")
    return [n for n in names if n not in first or n not in second or not _same_bits(first[n], second[n])]


def _same_bits(first: Tensor, second: Tensor) -> bool:
    if first.dtype != second.dtype or not torch.equal(first, second):
        return False
    signs = (torch.signbit(first), torch.signbit(second))
    return torch.equal(*signs)
