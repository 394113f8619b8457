"""The data that flows between rollout, rewards, algorithm and trainer. Plain and immutable; no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

Float32Array = NDArray[np.float32]
FinishReason = Literal["stop", "length", "abort"]
Role = Literal["driver", "trainer", "rollout"]
SampleKey = tuple[int, int]
"""(prompt index, sample index): the one order in which vime lists samples."""


@dataclass(frozen=True)
class KeptTokens:
    """What top-k and top-p left to choose from at each response token; empty when nothing was ever cut.

    ``tokens`` are ids, ascending within a position and the positions one after another. ``counts`` says how many are
    each position's; 0: the whole vocabulary was left there.
    """

    tokens: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()


WHOLE_VOCABULARY: Final = KeptTokens()


@dataclass(frozen=True)
class Drawn:
    """What a trainer says of a sampled response, of its request's temperature, top-k, top-p and seed.

    ``tokens`` are what the seed draws at each response token, ``log_probs``, fp32 [R], those of the sampled tokens, and
    ``kept`` what is left there to draw from.
    """

    tokens: tuple[int, ...]
    log_probs: Float32Array
    kept: KeptTokens = WHOLE_VOCABULARY


@dataclass(frozen=True)
class SampleRequest:
    """One response to generate. ``seed`` is the keyed hash of run seed, step, prompt and sample index."""

    prompt_index: int
    sample_index: int
    prompt_tokens: tuple[int, ...]
    seed: int
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()

    @property
    def key(self) -> SampleKey:
        return (self.prompt_index, self.sample_index)


@dataclass(frozen=True)
class Completion:
    """What the engine returned for one request.

    ``log_probs`` is fp32 [R], one for each response token, of the distribution that was sampled from
    (after temperature, top-k and top-p). ``weight_version`` is the version that the engine held while generating.
    ``kept`` is what log-probs are normalised over; only an engine that keeps an alignment contract says it.
    """

    prompt_index: int
    sample_index: int
    tokens: tuple[int, ...]
    log_probs: Float32Array
    finish_reason: FinishReason
    weight_version: int
    kept: KeptTokens = WHOLE_VOCABULARY

    @property
    def key(self) -> SampleKey:
        return (self.prompt_index, self.sample_index)


@dataclass(frozen=True)
class Sample:
    """A scored response: the unit of the run record and of training."""

    prompt_index: int
    sample_index: int
    dataset_index: int
    prompt_tokens: tuple[int, ...]
    response_tokens: tuple[int, ...]
    rollout_log_probs: Float32Array
    loss_mask: tuple[bool, ...]
    reward: float
    weight_version: int
    finish_reason: FinishReason
    seed: int
    response_text: str = ""
    kept: KeptTokens = WHOLE_VOCABULARY

    @property
    def key(self) -> SampleKey:
        return (self.prompt_index, self.sample_index)

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.prompt_tokens + self.response_tokens


@dataclass(frozen=True)
class TrainSequence:
    """One sequence as the trainer sees it; it never holds the rollout's log-probs.

    All arrays are fp32 [R] over the response tokens. ``weights`` already holds mask and denominator, so that the
    loss of a step is the plain sum of weight x token loss, whatever the packing. ``old_log_probs`` None means:
    use the training forward's own values, detached. Log-probs are normalised over what is ``kept``, so that a ratio
    is one of the distributions that were sampled from.
    """

    key: SampleKey
    tokens: tuple[int, ...]
    response_start: int
    advantages: Float32Array
    weights: Float32Array
    old_log_probs: Float32Array | None = None
    reference_log_probs: Float32Array | None = None
    kept: KeptTokens = WHOLE_VOCABULARY

    @property
    def response_length(self) -> int:
        return len(self.tokens) - self.response_start


def scoring_sequence(
    key: SampleKey, prompt: tuple[int, ...], response: tuple[int, ...], kept: KeptTokens = WHOLE_VOCABULARY
) -> TrainSequence:
    """A sequence without a gradient of its own."""
    zeros = np.zeros(len(response), dtype=np.float32)
    return TrainSequence(key, prompt + response, len(prompt), zeros, zeros, kept=kept)


@dataclass(frozen=True)
class TrainStepResult:
    """What one optimizer step gave. ``log_probs`` are the training forward's, fp32 [R] a sequence, in input order."""

    loss: float
    grad_norm: float
    learning_rate: float
    log_probs: tuple[Float32Array, ...]
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True)
class ProcessReport:
    """One process of a run, read back after its start: what is effective, not what was asked for."""

    role: Role
    rank: int
    pid: int
    environment: Mapping[str, str]
    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    hardware: Mapping[str, Any]


_Keyed = TypeVar("_Keyed", SampleRequest, Completion, Sample)


def in_sample_order(items: Sequence[_Keyed]) -> list[_Keyed]:
    """Sort by (prompt index, sample index), the only order that leaves a collection of samples."""
    return sorted(items, key=lambda item: item.key)
