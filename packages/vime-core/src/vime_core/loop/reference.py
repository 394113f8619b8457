"""The reference model: a frozen second copy of the weights on the trainer, and what its log-probs are used for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vime_core.backends import ReferenceTrainer, Trainer
from vime_core.errors import ConfigError
from vime_core.loop.algorithm import Algorithm, in_order_of
from vime_core.types import Float32Array, Sample, TrainSequence


def reference_trainer(algorithm: Algorithm, trainer: Trainer) -> ReferenceTrainer | None:
    """The trainer, which then holds its weights as the reference, or None where no reference is needed.

    Raises:
        ConfigError: a KL is asked for, and this trainer keeps no reference.
    """
    if not algorithm.needs_reference:
        return None
    candidate: Any = trainer  # a runtime protocol narrows to no type of its own
    if not isinstance(candidate, ReferenceTrainer):
        raise ConfigError(
            f"a KL to the reference model is configured, and trainer.backend = {algorithm.config.trainer.backend!r}"
            " keeps no reference",
            remedy="Set kl_coefficient and algorithm.reward_kl to 0, or choose another trainer.",
            code="VIME-CONFIG-020",
        )
    candidate.keep_reference()
    return candidate


def reference_log_probs(
    algorithm: Algorithm, trainer: ReferenceTrainer, samples: Sequence[Sample]
) -> list[Float32Array]:
    """The reference's log-prob of every response token, fp32 [R] a sample, in sample order."""
    sequences = [_to_score(sample) for sample in samples]
    microbatches = algorithm.microbatches(sequences)
    return in_order_of(sequences, microbatches, trainer.reference_log_probs(microbatches))


def penalised_rewards(samples: Sequence[Sample], reference: Sequence[Float32Array], coefficient: float) -> list[float]:
    """``reward - coefficient * KL`` with the KL of a response estimated as the sum of its tokens' log-ratios (k1).

    The policy's log-probs are those that were sampled with. Source: InstructGPT (arXiv 2203.02155), equation 2.
    """
    return [
        sample.reward - coefficient * float((sample.rollout_log_probs.astype(np.float64) - values).sum())
        for sample, values in zip(samples, reference, strict=True)
    ]


def _to_score(sample: Sample) -> TrainSequence:
    zeros = np.zeros(len(sample.response_tokens), dtype=np.float32)
    return TrainSequence(sample.key, sample.tokens, len(sample.prompt_tokens), zeros, zeros, kept=sample.kept)
