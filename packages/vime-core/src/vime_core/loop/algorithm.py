"""From scored samples to training sequences: advantages, loss weights, microbatches, old log-probs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from typing import TYPE_CHECKING

import numpy as np
from pydantic import BaseModel

from vime_core.backends import EntropyTrainer, Microbatches, Trainer
from vime_core.config.schema import CorrectionSection, RunConfig
from vime_core.errors import BackendError, ConfigError
from vime_core.plugins.manager import PluginManager
from vime_core.plugins.types import AdvantageEstimator, Loss
from vime_core.rl.correction import importance_factors
from vime_core.rl.packing import pack
from vime_core.types import Float32Array, Sample, TrainSequence

if TYPE_CHECKING:
    from torch import Tensor

    from vime_core.rl.losses import TokenBatch, TokenLoss

Estimate = Callable[..., "Tensor"]
"""(rewards [P, G], options) to advantages [P, G]; with a third argument, bool [P, G], where responses are absent."""


@dataclass(frozen=True)
class ConfiguredLoss:
    """A loss with its options: a `vime_core.backends.LossFunction`."""

    function: Callable[[TokenBatch, BaseModel], TokenLoss]
    options: BaseModel

    def __call__(self, batch: TokenBatch) -> TokenLoss:
        return self.function(batch, self.options)

    @property
    def needs_reference(self) -> bool:
        """Whether the batches must hold reference log-probs."""
        return getattr(self.options, "kl_coefficient", 0.0) > 0

    @property
    def needs_entropy(self) -> bool:
        """Whether the batches must hold the entropy."""
        return getattr(self.options, "entropy_coefficient", 0.0) > 0


@dataclass(frozen=True)
class Algorithm:
    """The configured algorithm with its plugins loaded. ``loss`` already holds its options."""

    config: RunConfig
    estimate: Estimate
    estimate_options: BaseModel
    loss: ConfiguredLoss
    needs_reference: bool = False

    def advantages(self, rewards: Sequence[float], present: Sequence[bool] | None = None) -> Float32Array:
        """One advantage a sample from one reward a sample, fp32 [P * G], in sample order.

        Samples that are not ``present`` have advantage 0 and no part in another's.
        """
        import torch

        groups = self.config.sampling.samples_per_prompt
        rewards_PG = torch.tensor(list(rewards), dtype=torch.float32).view(-1, groups)
        absent = [] if present is None or all(present) else [torch.tensor(list(present)).view(-1, groups)]
        return self.estimate(rewards_PG, self.estimate_options, *absent).reshape(-1).numpy()

    def minibatches(
        self,
        samples: Sequence[Sample],
        advantages: Float32Array,
        reference: Sequence[Float32Array] | None = None,
    ) -> list[list[TrainSequence]]:
        """The samples of each optimizer step, whole prompts in order, with loss weights of that step's own total."""
        from vime_core.rl.reduction import token_weights

        parts = _split_prompts(len(samples), self.config)
        result: list[list[TrainSequence]] = []
        for part in parts:
            weights = token_weights(
                self.config.algorithm.reduction,
                [samples[i].loss_mask for i in part],
                self.config.sampling.max_tokens,
            )
            result.append(
                [
                    _sequence(samples[i], float(advantages[i]), w, None if reference is None else reference[i])
                    for i, w in zip(part, weights, strict=True)
                ]
            )
        return result

    def microbatches(self, sequences: Sequence[TrainSequence]) -> list[list[TrainSequence]]:
        """Pack sequences to the token budget, in order."""
        plan = pack([len(s.tokens) for s in sequences], self.config.trainer.token_budget)
        return [[sequences[i] for i in microbatch] for microbatch in plan]


def in_order_of(
    sequences: Sequence[TrainSequence], microbatches: Microbatches, values: Sequence[Float32Array]
) -> list[Float32Array]:
    """What the trainer returned in the order of the microbatches, in the order of the sequences.

    Raises:
        BackendError: the values do not cover the sequences, each once and token by token.
    """
    flat = [sequence for microbatch in microbatches for sequence in microbatch]
    by_key = {s.key: v for s, v in zip(flat, values, strict=False)}
    covered = len(flat) == len(values) == len(by_key) == len(sequences)
    if not covered or any(len(by_key[s.key]) != s.response_length for s in sequences):
        raise BackendError(
            f"the trainer returned log-probs of {len(values)} sequences for {len(sequences)}, or of other lengths",
            remedy="This is an error of the trainer plugin; report it with the run record.",
            code="VIME-BACKEND-003",
        )
    return [by_key[sequence.key] for sequence in sequences]


def load_algorithm(config: RunConfig, plugins: PluginManager) -> Algorithm:
    """Load the configured advantage estimator and loss."""
    section = config.algorithm
    estimator = plugins.find(AdvantageEstimator, section.advantage, field_name="algorithm.advantage")
    loss = plugins.find(Loss, section.loss, field_name="algorithm.loss")
    configured = ConfiguredLoss(loss.load(), config.options("algorithm", section.loss))
    algorithm = Algorithm(
        config=config,
        estimate=estimator.load(),
        estimate_options=config.options("algorithm", section.advantage),
        loss=configured,
        needs_reference=section.reward_kl > 0 or configured.needs_reference,
    )
    _refuse_entropy_under_contract(config, configured)
    _refuse_update_of_nothing(algorithm)
    _try(algorithm)
    return algorithm


def require_entropy(algorithm: Algorithm, trainer: Trainer) -> None:
    """Raise ConfigError when the loss needs the entropy and this trainer gives none."""
    if algorithm.loss.needs_entropy and not isinstance(trainer, EntropyTrainer):
        raise ConfigError(
            f"algorithm.{algorithm.config.algorithm.loss}.entropy_coefficient is set, and trainer.backend ="
            f" {algorithm.config.trainer.backend!r} gives no entropy",
            remedy="Set entropy_coefficient = 0, or choose another trainer.",
            code="VIME-CONFIG-022",
        )


def _refuse_entropy_under_contract(config: RunConfig, loss: ConfiguredLoss) -> None:
    if loss.needs_entropy and config.alignment.contract:
        raise ConfigError(
            f"algorithm.{config.algorithm.loss}.entropy_coefficient is set, and alignment.contract ="
            f" {config.alignment.contract!r} defines no entropy: its gradient would not be the contract's",
            remedy="Set entropy_coefficient = 0, or leave alignment.contract empty.",
            code="VIME-CONFIG-022",
        )


def _refuse_update_of_nothing(algorithm: Algorithm) -> None:
    section = algorithm.config.algorithm
    if section.reference_update_every and not algorithm.needs_reference:
        raise ConfigError(
            f"algorithm.reference_update_every = {section.reference_update_every} updates a reference model, and this"
            f" run has none: algorithm.reward_kl = 0 and the loss {section.loss!r} takes none",
            remedy=f"Set algorithm.reward_kl or algorithm.{section.loss}.kl_coefficient above 0, or leave it out.",
            code="VIME-CONFIG-024",
        )


def _try(algorithm: Algorithm) -> None:
    """Run estimator and loss once on zeros, so that what they refuse is refused before anything is generated."""
    import torch

    from vime_core.rl.losses import TokenBatch

    config = algorithm.config
    if config.algorithm.overlong == "drop" and len(signature(algorithm.estimate).parameters) < 3:
        raise ConfigError(
            f"algorithm.overlong = 'drop' makes groups of unequal size, and algorithm.advantage ="
            f" {config.algorithm.advantage!r} takes none: it has no third argument for which responses are present",
            remedy="Set algorithm.overlong = 'mask', or choose another algorithm.advantage.",
            code="VIME-CONFIG-023",
        )
    try:
        algorithm.estimate(torch.zeros(1, config.sampling.samples_per_prompt), algorithm.estimate_options)
    except ValueError as error:
        raise ConfigError(
            f"algorithm.advantage = {config.algorithm.advantage!r} does not accept"
            f" sampling.samples_per_prompt = {config.sampling.samples_per_prompt}: {error}",
            remedy="Change one of the two keys.",
            code="VIME-CONFIG-010",
        ) from error
    zeros = torch.zeros(1)
    reference, entropy = (
        zeros if needed else None for needed in (algorithm.needs_reference, algorithm.loss.needs_entropy)
    )
    algorithm.loss(TokenBatch(zeros, zeros, zeros, reference, entropy=entropy))


def with_old_log_probs(
    sequences: Sequence[TrainSequence], old_log_probs: Sequence[Float32Array]
) -> list[TrainSequence]:
    """The same sequences with the log-probs of the policy that is being improved."""
    return [replace(s, old_log_probs=old) for s, old in zip(sequences, old_log_probs, strict=True)]


def corrected(
    section: CorrectionSection, minibatches: Sequence[Sequence[TrainSequence]], samples: Sequence[Sample]
) -> tuple[list[list[TrainSequence]], dict[str, float]]:
    """The minibatches with loss weights times the importance factors of their tokens, and the factors' metrics.

    The sequences hold the trainer's log-probs before the update.
    """
    rollout = {sample.key: sample.rollout_log_probs for sample in samples}
    flat = [sequence for part in minibatches for sequence in part]
    found = importance_factors(
        [sequence.old_log_probs for sequence in flat if sequence.old_log_probs is not None],
        [rollout[sequence.key] for sequence in flat],
        level=section.level,
        mode=section.mode,
        low=section.low,
        high=section.high,
        reject=section.reject,
    )
    factors = iter(found.factors)
    return [[replace(s, weights=s.weights * next(factors)) for s in part] for part in minibatches], found.metrics


def _split_prompts(samples: int, config: RunConfig) -> list[range]:
    prompts = samples // config.sampling.samples_per_prompt
    updates = config.algorithm.updates_per_rollout
    edges = [prompts * i // updates * config.sampling.samples_per_prompt for i in range(updates + 1)]
    return [range(a, b) for a, b in itertools.pairwise(edges) if b > a]


def _sequence(sample: Sample, advantage: float, weights: Float32Array, reference: Float32Array | None) -> TrainSequence:
    return TrainSequence(
        key=sample.key,
        tokens=sample.tokens,
        response_start=len(sample.prompt_tokens),
        advantages=np.full(len(sample.response_tokens), advantage, dtype=np.float32),
        weights=weights,
        kept=sample.kept,
        reference_log_probs=reference,
    )
