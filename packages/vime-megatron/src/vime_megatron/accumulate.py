"""From a microbatch's log-probs to its loss, and from microbatches to a step's totals."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from vime_core.backends import LossFunction
from vime_core.errors import BackendError
from vime_core.rl.losses import TokenBatch
from vime_core.types import Float32Array, TrainSequence, TrainStepResult
from vime_megatron.packing import PackedMicrobatch, flatten


@dataclass(frozen=True)
class HostTokens:
    """What a microbatch adds to a step's totals; ``loss`` is its sum of weight x loss."""

    loss: float
    weight: float
    metric_sums: Mapping[str, float]
    log_probs: tuple[Float32Array, ...]


@dataclass(frozen=True)
class ScoredTokens:
    """``weighted_loss`` is the fp32 scalar sum of weight x loss, with gradients; the rest is on the host."""

    weighted_loss: Tensor
    weight: float
    metric_sums: Mapping[str, float]
    log_probs: tuple[Float32Array, ...]

    def on_host(self) -> HostTokens:
        """The same without gradients."""
        return HostTokens(self.weighted_loss.item(), self.weight, self.metric_sums, self.log_probs)


@dataclass
class StepTotals:
    """Sums over the microbatches of a step, in fp64."""

    loss: float = 0.0
    weight: float = 0.0
    metric_sums: dict[str, float] = field(default_factory=dict[str, float])
    log_probs: list[Float32Array] = field(default_factory=list[Float32Array])

    def add(self, tokens: HostTokens) -> None:
        """Add one microbatch."""
        self.loss += tokens.loss
        self.weight += tokens.weight
        for name, value in tokens.metric_sums.items():
            self.metric_sums[name] = self.metric_sums.get(name, 0.0) + value
        self.log_probs += tokens.log_probs

    def result(self, grad_norm: float, learning_rate: float) -> TrainStepResult:
        """The step's result; metrics are means over tokens, by their weights, and absent when all weights are 0."""
        metrics = {name: value / self.weight for name, value in self.metric_sums.items()} if self.weight else {}
        return TrainStepResult(self.loss, grad_norm, learning_rate, tuple(self.log_probs), metrics)


def score_tokens(
    index: int, sequences: Sequence[TrainSequence], batch: PackedMicrobatch, scored: Tensor, loss: LossFunction
) -> ScoredTokens:
    """Apply the loss to one microbatch.

    Args:
        index: of the microbatch in its step, for messages.
        sequences: what was packed.
        batch: the pack.
        scored: log-probs, fp32 [N] with gradients; or [2, N], log-probs and entropies.
        loss: per-token loss.

    Raises:
        BackendError: a log-prob or a loss is not finite; names the sample.
    """
    log_probs, *entropy = scored.unbind() if scored.ndim == 2 else (scored,)
    _require_finite("log-prob", index, sequences, batch, log_probs)
    tokens = loss(replace(_token_batch(sequences, log_probs), entropy=entropy[0] if entropy else None))
    _require_finite("loss", index, sequences, batch, tokens.loss_N)
    weights = flatten([s.weights for s in sequences], log_probs.device)
    sums = {name: float((weights.double() * value.double()).sum()) for name, value in tokens.metrics.items()}
    return ScoredTokens(
        weighted_loss=(weights * tokens.loss_N).sum(),
        weight=float(weights.double().sum()),
        metric_sums=sums,
        log_probs=tuple(batch.split(log_probs)),
    )


def _token_batch(sequences: Sequence[TrainSequence], log_probs: Tensor) -> TokenBatch:
    on = log_probs.device
    references = [s.reference_log_probs for s in sequences if s.reference_log_probs is not None]
    if references and len(references) < len(sequences):
        raise ValueError("a microbatch mixes sequences with and without reference log-probs")
    return TokenBatch(
        log_probs=log_probs,
        old_log_probs=_old_log_probs(sequences, log_probs.detach()),
        advantages=flatten([s.advantages for s in sequences], on),
        reference_log_probs=flatten(references, on) if references else None,
        lengths=tuple(s.response_length for s in sequences),
    )


def _old_log_probs(sequences: Sequence[TrainSequence], own: Tensor) -> Tensor:
    """Given values where a sequence has them, else the training forward's own."""
    parts = own.split([s.response_length for s in sequences])
    given = [
        part if s.old_log_probs is None else flatten([s.old_log_probs], own.device)
        for s, part in zip(sequences, parts, strict=True)
    ]
    return torch.cat(given)


def _require_finite(
    what: str, index: int, sequences: Sequence[TrainSequence], batch: PackedMicrobatch, values: Tensor
) -> None:
    finite = torch.isfinite(values)
    if bool(finite.all()):
        return
    parts = zip(sequences, finite.split(list(batch.response_lengths)), strict=True)
    keys = [str(sequence.key) for sequence, part in parts if not bool(part.all())]
    raise BackendError(
        f"microbatch {index}: the {what} of {int((~finite).sum())} tokens is not finite, in samples {', '.join(keys)}"
        " (prompt, sample); the weights are unchanged",
        remedy="Look at the advantages and old log-probs of these samples; a lower trainer.lr may help.",
        code="VIME-BACKEND-022",
    )
