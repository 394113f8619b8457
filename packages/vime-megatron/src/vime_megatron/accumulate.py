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
    """``weighted_loss`` is the fp32 scalar sum of weight x loss, with gradients; ``log_probs`` is fp32 [N].

    The rest waits on the device until `on_host`: ``sums`` are fp64 [4 + metrics], of loss, weights, log-probs and
    losses that are not finite, and metrics.
    """

    weighted_loss: Tensor
    log_probs: Tensor
    losses: Tensor
    sums: Tensor
    metrics: tuple[str, ...]
    batch: PackedMicrobatch
    sequences: Sequence[TrainSequence]
    index: int

    def on_host(self) -> HostTokens:
        """The same without gradients. Waits for the device, so ask when it has more to do, or nothing any more.

        Raises:
            BackendError: a log-prob or a loss is not finite; names the sample.
        """
        loss, weight, *bad = (numbers := [float(number) for number in self.sums.tolist()])[:4]
        for what, count, values in zip(("log-prob", "loss"), bad, (self.log_probs, self.losses), strict=True):
            if count:
                raise _not_finite(what, self.index, self.sequences, self.batch, values)
        sums = dict(zip(self.metrics, numbers[4:], strict=True))
        return HostTokens(loss, weight, sums, tuple(self.batch.split(self.log_probs)))


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
    """Apply the loss to one microbatch, without waiting for the device.

    Args:
        index: of the microbatch in its step, for messages.
        sequences: what was packed.
        batch: the pack.
        scored: log-probs, fp32 [N] with gradients; or [2, N], log-probs and entropies.
        loss: per-token loss.
    """
    log_probs, *entropy = scored.unbind() if scored.ndim == 2 else (scored,)
    tokens = loss(replace(_token_batch(sequences, log_probs), entropy=entropy[0] if entropy else None))
    weights = flatten([s.weights for s in sequences], log_probs.device)
    weighted_loss = (weights * tokens.loss_N).sum()
    detached = log_probs.detach(), tokens.loss_N.detach()
    wide = weights.double()
    sums = [
        weighted_loss.detach().double(),
        wide.sum(),
        *((~torch.isfinite(values)).sum().double() for values in detached),
        *((wide * value.double()).sum() for value in tokens.metrics.values()),
    ]
    return ScoredTokens(
        weighted_loss, *detached, torch.stack(sums), tuple(tokens.metrics), batch, tuple(sequences), index
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


def _not_finite(
    what: str, index: int, sequences: Sequence[TrainSequence], batch: PackedMicrobatch, values: Tensor
) -> BackendError:
    finite = torch.isfinite(values)
    parts = zip(sequences, finite.split(list(batch.response_lengths)), strict=True)
    keys = [str(sequence.key) for sequence, part in parts if not bool(part.all())]
    return BackendError(
        f"microbatch {index}: the {what} of {int((~finite).sum())} tokens is not finite, in samples {', '.join(keys)}"
        " (prompt, sample); the weights are unchanged",
        remedy="Look at the advantages and old log-probs of these samples; a lower trainer.lr may help.",
        code="VIME-BACKEND-022",
    )
