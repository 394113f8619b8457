"""Under a contract every step is a check: the trainer's log-prob of a token is the one it was sampled with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vime_core.backends import DrawingTrainer, Trainer
from vime_core.config.schema import RunConfig
from vime_core.errors import ConfigError, ContractViolation
from vime_core.types import Drawn, Float32Array, Sample


def require_draws(config: RunConfig, trainer: Trainer) -> None:
    """Raise ConfigError when a contract's run is to be evaluated, and its trainer could not hold evaluations to it."""
    if config.alignment.contract and config.evaluation.every and not isinstance(trainer, DrawingTrainer):
        raise ConfigError(
            f"evaluation.every = {config.evaluation.every} under alignment.contract = {config.alignment.contract!r},"
            f" and trainer.backend = {config.trainer.backend!r} has no draw_again: nothing would hold an evaluation to"
            " the contract",
            remedy="Set evaluation.every = 0, or choose another trainer.",
            code="VIME-CONFIG-025",
        )


def require_aligned(contract: str, where: str, samples: Sequence[Sample], log_probs: Sequence[Float32Array]) -> None:
    """Compare raw bits of what the engine sampled with and of the trainer's forward before any update.

    Args:
        contract: id of the contract; empty: nothing was promised and nothing is compared.
        where: for the message, such as ``step 3``.
        samples: all of it.
        log_probs: fp32 [R] a sample, by the weights that sampled it: of the training forward for the step's first
            optimizer step, of a forward before it for the later ones.

    Raises:
        ContractViolation: a log-prob differs (NaN always does), or nothing was compared.
    """
    if not contract:
        return
    pairs = list(zip(samples, log_probs, strict=True))
    tokens = sum(len(values) for _, values in pairs)
    if tokens == 0:
        raise _violation(contract, where, "nothing could be compared")
    places = [(s, int(t), v) for s, v in pairs for t in np.flatnonzero(_unequal(s.rollout_log_probs, v))]
    if places:
        sample, token, values = places[0]
        engine, trainer = float(sample.rollout_log_probs[token]), float(values[token])
        raise _violation(
            contract,
            where,
            f"{len(places)} of {tokens} log-probs differ, first in sample {sample.key} (prompt, sample), token {token}:"
            f" {engine!r} in the engine, {trainer!r} in the trainer",
        )


def _unequal(first: Float32Array, second: Float32Array) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    return (first.view(np.uint32) != second.view(np.uint32)) | np.isnan(first) | np.isnan(second)


def require_drawn(contract: str, where: str, samples: Sequence[Sample], again: Sequence[Drawn]) -> None:
    """Compare the tokens that an engine returned with those that the trainer draws from its own logits.

    Raises:
        ContractViolation: one differs, or what top-k and top-p left; or nothing was compared.
    """
    if not any(sample.response_tokens for sample in samples):
        raise _violation(contract, where, "nothing could be drawn again")
    for sample, drawn in zip(samples, again, strict=True):
        if sample.response_tokens != drawn.tokens or sample.kept != drawn.kept:
            raise _violation(contract, where, f"sample {sample.key} (prompt, sample), {_other_draw(sample, drawn)}")


def _other_draw(sample: Sample, drawn: Drawn) -> str:
    pairs = enumerate(zip(sample.response_tokens, drawn.tokens, strict=False))
    for token, (engine, trainer) in pairs:
        if engine != trainer:
            return f"token {token}: the engine returned {engine}, and the trainer draws {trainer} from equal logits"
    if len(sample.response_tokens) != len(drawn.tokens):
        return f"the engine returned {len(sample.response_tokens)} tokens, and the trainer draws {len(drawn.tokens)}"
    return "top-k and top-p leave other tokens to draw from in the engine than in the trainer"


def _violation(contract: str, where: str, what: str) -> ContractViolation:
    return ContractViolation(
        f"contract {contract} does not hold in {where}: {what}",
        remedy="The step is recorded; `vime verify align CONFIG --layers` finds the operation. Do not use this run.",
        code="VIME-ALIGN-005",
    )
