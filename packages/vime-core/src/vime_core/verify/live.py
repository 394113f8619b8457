"""What verdicts do with two live sides: generate, score, take optimizer steps, update the engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from vime_core.backends import DrawingRollout, DrawingTrainer, Microbatches, NamedTensors, Trainer
from vime_core.config.schema import RunConfig
from vime_core.loop.prompts import training_requests
from vime_core.loop.sides import Parts, Sides
from vime_core.record.digest import digest_tensors
from vime_core.types import (
    Completion,
    Drawn,
    Float32Array,
    SampleKey,
    SampleRequest,
    TrainSequence,
    in_sample_order,
    scoring_sequence,
)
from vime_core.verify.matching import Scored

if TYPE_CHECKING:
    from torch import Tensor

DrawnAgain = Mapping[SampleKey, Drawn]
UPDATE_LR: Final = 1e-3
"""Learning rate of the optimizer steps that verdicts take: large enough that bf16 weights move."""


@dataclass
class GradientDigests:
    """A `vime_core.backends.StateObserver` that keeps a digest of each gradient."""

    digests: dict[str, str] = field(default_factory=dict[str, str])

    def gradients(self, tensors: NamedTensors) -> None:
        self.digests = digest_tensors(tensors)


def with_learning_rate(config: RunConfig, lr: float) -> RunConfig:
    """The configuration with another learning rate, without warm-up."""
    return config.model_copy(update={"trainer": config.trainer.model_copy(update={"lr": lr, "warmup_steps": 0})})


def first_requests(parts: Parts, samples: int) -> list[SampleRequest]:
    """The first ``samples`` requests that a run of this configuration makes; 0: those of its first step."""
    config = parts.config
    requests = training_requests(config, 0, parts.prompts.step(0))
    step = 1
    while len(requests) < samples:
        requests += training_requests(config, step, parts.prompts.step(step))
        step += 1
    return requests[:samples] if samples else requests


def answers(completions: Iterable[Completion]) -> list[Scored]:
    """The engine's completions as it returned them."""
    return [Scored(c.key, c.tokens, c.log_probs, c.weight_version, c.kept, c.finish_reason) for c in completions]


def sequences_of(requests: Sequence[SampleRequest], completions: Sequence[Completion]) -> list[TrainSequence]:
    """What the trainer scores: prompt of the request and response of the completion with its key, in sample order.

    Completions of keys that nobody asked for are left out; `matching_faults` names them.
    """
    prompts = {request.key: request.prompt_tokens for request in requests}
    first = {c.key: c for c in reversed(completions) if c.key in prompts}
    return [scoring_sequence(c.key, prompts[c.key], c.tokens, c.kept) for c in in_sample_order(list(first.values()))]


def score(sides: Sides, sequences: Sequence[TrainSequence], weight_version: int) -> list[Scored]:
    """The trainer's log-probs without gradients, as it returned them."""
    microbatches = sides.parts.algorithm.microbatches(sequences)
    return paired(microbatches, sides.trainer.log_probs(microbatches), weight_version)


def draw_again(sides: Sides, requests: Sequence[SampleRequest], sequences: Sequence[TrainSequence]) -> DrawnAgain | str:
    """What the requests' seeds draw on the trainer's side, by key; or why that says nothing about the engine."""
    if sides.parts.alignment is None:
        return "no contract says how the engine draws"
    if not (isinstance(sides.rollout, DrawingRollout) and sides.rollout.draws_by_contract()):
        return "the engine does not say that it draws by the contract"
    if not isinstance(sides.trainer, DrawingTrainer):
        return "the trainer cannot draw"
    microbatches = sides.parts.algorithm.microbatches(sequences)
    drawn = sides.trainer.draw_again(microbatches, {request.key: request for request in requests})
    flat = [sequence.key for microbatch in microbatches for sequence in microbatch]
    return dict(zip(flat, drawn, strict=True))


def engine_stops(sides: Sides) -> frozenset[int] | None:
    """The tokens that end a response without being asked for, as the engine reported them at its start."""
    told = [report.settings.get("stop_token_ids") for report in sides.reports if report.role == "rollout"]
    known = [ids for ids in told if ids is not None]
    return frozenset(token for ids in known for token in ids) if known else None


def paired(microbatches: Microbatches, values: Sequence[Float32Array], weight_version: int) -> list[Scored]:
    """What a trainer returned with the sequences that it belongs to; what is missing stays missing."""
    flat = [sequence for microbatch in microbatches for sequence in microbatch]
    return [Scored(s.key, s.tokens[s.response_start :], v, weight_version) for s, v in zip(flat, values, strict=False)]


def take_step(
    sides: Sides, requests: Sequence[SampleRequest], completions: Sequence[Completion], weight_version: int
) -> list[Scored]:
    """One optimizer step on all samples, rewarded +1 and -1 in turns, whatever the run's reward says of them.

    Returns:
        The training forward's log-probs, of ``weight_version``.
    """
    microbatches = sides.parts.algorithm.microbatches(_trained(sides.parts.config, requests, completions))
    result = sides.trainer.train_step(microbatches, sides.parts.algorithm.loss, GradientDigests())
    return paired(microbatches, result.log_probs, weight_version)


def _trained(
    config: RunConfig, requests: Sequence[SampleRequest], completions: Sequence[Completion]
) -> list[TrainSequence]:
    from vime_core.rl.reduction import token_weights

    weights = token_weights(config.algorithm.reduction, [(True,) * len(c.tokens) for c in completions])
    return [
        TrainSequence(
            key=request.key,
            tokens=request.prompt_tokens + completion.tokens,
            response_start=len(request.prompt_tokens),
            advantages=np.full(len(completion.tokens), 1.0 if number % 2 else -1.0, dtype=np.float32),
            weights=weights_R,
            kept=completion.kept,
        )
        for number, (request, completion, weights_R) in enumerate(zip(requests, completions, weights, strict=True))
    ]


def bfloat16_weights(trainer: Trainer) -> dict[str, Tensor]:
    """Copies of the trainer's weights by HF name, rounded to bfloat16 where they are not."""
    import torch

    return {name: tensor.detach().to(torch.bfloat16, copy=True) for name, tensor in trainer.weights()}


def changed_share(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> float:
    """Share of all weight elements whose bits differ; 0 without elements. Raises KeyError for a missing tensor."""
    import torch

    total = sum(tensor.numel() for tensor in before.values())
    changed = sum(
        int((tensor.view(torch.int16) != after[name].view(torch.int16)).sum()) for name, tensor in before.items()
    )
    return changed / total if total else 0.0
