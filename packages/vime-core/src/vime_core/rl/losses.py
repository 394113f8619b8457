"""Policy losses per token. A loss is ``(TokenBatch, options) -> TokenLoss``; how tokens are weighted and summed is
`vime_core.rl.reduction`'s business, so that a loss knows nothing of packing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from pydantic import Field, field_validator
from torch import Tensor

from vime_core.errors import ConfigError
from vime_core.plugins.types import Options
from vime_core.rl.kl import KlEstimator, kl_per_token


@dataclass(frozen=True)
class TokenBatch:
    """Response tokens of a microbatch, flattened in order. All tensors are fp32 [N] on one device.

    Only ``log_probs`` and ``entropy`` carry gradients. ``reference_log_probs`` are the frozen reference model's,
    ``entropy`` is of the distribution that each token was drawn from, in nats. ``lengths`` are the tokens of each
    response, in order; empty: all are of one.

    Raises:
        ValueError: a shape or dtype differs, the lengths do not sum to N, or another tensor requires a gradient.
    """

    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    reference_log_probs: Tensor | None = None
    lengths: tuple[int, ...] = ()
    entropy: Tensor | None = None

    def __post_init__(self) -> None:
        for name, tensor in vars(self).items():
            if tensor is not None and name != "lengths":
                _check_tokens(name, tensor, self.log_probs.shape)
        if self.lengths and sum(self.lengths) != len(self.log_probs):
            raise ValueError(f"lengths sum to {sum(self.lengths)}, and there are {len(self.log_probs)} tokens")


def _check_tokens(name: str, tensor: Tensor, shape: torch.Size) -> None:
    if tensor.ndim != 1 or tensor.dtype != torch.float32 or tensor.shape != shape:
        raise ValueError(f"{name} must be fp32 [{shape[0] if shape else 'N'}], got {tensor.dtype} {list(tensor.shape)}")
    if tensor.requires_grad and name not in ("log_probs", "entropy"):
        raise ValueError(f"{name} must be detached: only log_probs and entropy carry gradients")


@dataclass(frozen=True)
class TokenLoss:
    """``loss_N`` is fp32 [N] with gradients; ``metrics`` are fp32 [N] each, detached, averaged by the caller."""

    loss_N: Tensor  # noqa: N815
    metrics: Mapping[str, Tensor]


class EntropyOptions(Options):
    """A loss whose options have ``entropy_coefficient`` gets the entropy of each token when it is above 0."""

    entropy_coefficient: float = Field(
        0.0, ge=0, allow_inf_nan=False, description="Weight of the policy's entropy, which the loss rewards; 0: none."
    )


class KlOptions(EntropyOptions):
    """A loss whose options have ``kl_coefficient`` gets reference log-probs when it is above 0."""

    kl: KlEstimator = Field("k3", description="Estimator of the KL to the reference model.")
    kl_coefficient: float = Field(0.0, ge=0, allow_inf_nan=False, description="Weight of the KL in the loss; 0: none.")


class PpoClipOptions(KlOptions):
    """Options of `ppo_clip`."""

    clip_low: float = Field(0.2, ge=0, lt=1, description="The ratio's gradient ends below 1 - clip_low.")
    clip_high: float = Field(0.2, ge=0, allow_inf_nan=False, description="... and above 1 + clip_high.")
    dual_clip: float = Field(
        0.0, ge=0, allow_inf_nan=False, description="Bound c > 1 of the loss where A < 0: at most -c A; 0: none."
    )

    @field_validator("dual_clip")
    @classmethod
    def _above_one(cls, value: float) -> float:
        if 0 < value <= 1:
            raise ValueError("must be 0 (off) or above 1")
        return value


class GspoOptions(KlOptions):
    """Options of `gspo`. Sequence ratios are near 1, so their bounds are far tighter than PPO's."""

    clip_low: float = Field(3e-4, ge=0, lt=1, description="The gradient of a response ends below 1 - clip_low.")
    clip_high: float = Field(4e-4, ge=0, allow_inf_nan=False, description="... and above 1 + clip_high.")


class CispoOptions(KlOptions):
    """Options of `cispo`."""

    clip_low: float = Field(1.0, ge=0, le=1, description="The weight is at least 1 - clip_low; 1: no lower bound.")
    clip_high: float = Field(0.28, ge=0, allow_inf_nan=False, description="... and at most 1 + clip_high.")


def ppo_clip(batch: TokenBatch, options: PpoClipOptions) -> TokenLoss:
    """``-min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A) + kl_coefficient * KL``, with
    ``ratio = exp(log_probs - old_log_probs)``.

    Source: PPO (arXiv 1707.06347), equation 7; the separate upper bound: DAPO (arXiv 2503.14476), section 3.1; the KL
    in the loss: DeepSeekMath (arXiv 2402.03300), equation 3; ``entropy_coefficient`` times the token's entropy is
    subtracted. With ``dual_clip`` c the surrogate is at least ``c A``
    where A < 0: Mastering Complex Control in MOBA Games (arXiv 1912.09729), equation 5.

    Metrics: ``ratio``; ``clipped_low`` and ``clipped_high``, 1 where that bound ends the gradient, else 0;
    ``approx_kl``, k3 of KL(old || policy); ``reference_kl`` where there is a reference; ``entropy`` where it is given.

    A log-ratio above 88 overflows to infinity in fp32 and is not hidden by a clamp: the trainer refuses it.

    Raises:
        ConfigError: ``kl_coefficient`` is set and the batch has no reference log-probs, or ``entropy_coefficient`` and
            it has no entropy.
    """
    log_ratio = batch.log_probs - batch.old_log_probs
    ratio = torch.exp(log_ratio)
    low, high = 1.0 - options.clip_low, 1.0 + options.clip_high
    surrogate = torch.minimum(ratio * batch.advantages, torch.clamp(ratio, low, high) * batch.advantages)
    if options.dual_clip:
        bounded = torch.maximum(surrogate, options.dual_clip * batch.advantages)
        surrogate = torch.where(batch.advantages < 0, bounded, surrogate)
    return _finished(-surrogate, ratio, log_ratio, (low, high), batch, options)


def gspo(batch: TokenBatch, options: GspoOptions) -> TokenLoss:
    """``-min(s A, clip(s) A)`` with the sequence ratio ``s = exp(mean over the response of log-ratio)``, on each token.

    A token's loss carries the gradient of its own log-prob only, so that a sum over a response gives the gradient of
    the sequence's objective times its length (GSPO-token with one advantage a response is GSPO).
    Source: Group Sequence Policy Optimization (arXiv 2507.18071), equations 5 to 7 and 13.

    Metrics as `ppo_clip`; ``ratio`` is the sequence's, on each of its tokens.

    Raises:
        ConfigError: ``kl_coefficient`` is set and the batch has no reference log-probs, or ``entropy_coefficient`` and
            it has no entropy.
    """
    log_ratio = batch.log_probs - batch.old_log_probs
    sequence = _sequence_means(log_ratio.detach(), batch.lengths or (len(log_ratio),))
    ratio = torch.exp(sequence + (batch.log_probs - batch.log_probs.detach()))
    low, high = 1.0 - options.clip_low, 1.0 + options.clip_high
    surrogate = torch.minimum(ratio * batch.advantages, torch.clamp(ratio, low, high) * batch.advantages)
    return _finished(-surrogate, ratio, log_ratio, (low, high), batch, options)


def cispo(batch: TokenBatch, options: CispoOptions) -> TokenLoss:
    """``-sg(clip(ratio, 1 - clip_low, 1 + clip_high)) A log_prob``: a clipped weight ends no token's gradient.

    Source: MiniMax-M1 (arXiv 2506.13585), equation 4.

    Metrics as `ppo_clip`; ``clipped_low`` and ``clipped_high`` say where the weight is at its bound.

    Raises:
        ConfigError: ``kl_coefficient`` is set and the batch has no reference log-probs, or ``entropy_coefficient`` and
            it has no entropy.
    """
    log_ratio = batch.log_probs - batch.old_log_probs
    ratio = torch.exp(log_ratio.detach())
    low, high = 1.0 - options.clip_low, 1.0 + options.clip_high
    loss = -torch.clamp(ratio, low, high) * batch.advantages * batch.log_probs
    return _finished(loss, ratio, log_ratio, (low, high), batch, options, both_signs=True)


def _sequence_means(values_N: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """fp32 [N]: each token has the mean of its response, summed in fp64."""
    parts: list[Tensor] = []
    start = 0
    for length in lengths:
        if length:
            parts.append(values_N[start : start + length].double().mean().float().expand(length))
        start += length
    return torch.cat(parts) if parts else values_N


def _finished(
    loss: Tensor,
    ratio: Tensor,
    log_ratio: Tensor,
    bounds: tuple[float, float],
    batch: TokenBatch,
    options: KlOptions,
    *,
    both_signs: bool = False,
) -> TokenLoss:
    low, high = bounds
    metrics = {
        "ratio": ratio,
        "clipped_low": ((ratio < low) & (both_signs | (batch.advantages < 0))).float(),
        "clipped_high": ((ratio > high) & (both_signs | (batch.advantages > 0))).float(),
        "approx_kl": torch.expm1(log_ratio) - log_ratio,
    }
    loss = _with_entropy(_with_reference_kl(loss, metrics, batch, options), metrics, batch, options)
    return TokenLoss(loss, {name: value.detach() for name, value in metrics.items()})


def _with_reference_kl(loss: Tensor, metrics: dict[str, Tensor], batch: TokenBatch, options: KlOptions) -> Tensor:
    if batch.reference_log_probs is not None:
        metrics["reference_kl"] = kl_per_token(options.kl, batch.log_probs, batch.reference_log_probs)
        return loss + options.kl_coefficient * metrics["reference_kl"] if options.kl_coefficient else loss
    if options.kl_coefficient:
        raise ConfigError(
            f"kl_coefficient = {options.kl_coefficient}, but the batch has no reference log-probs",
            remedy="Set kl_coefficient = 0, or let the run compute reference log-probs.",
            code="VIME-CONFIG-020",
        )
    return loss


def _with_entropy(loss: Tensor, metrics: dict[str, Tensor], batch: TokenBatch, options: EntropyOptions) -> Tensor:
    """``loss - entropy_coefficient * entropy``. Source: A3C (arXiv 1602.01783), section 4."""
    if batch.entropy is not None:
        metrics["entropy"] = batch.entropy
        return loss - options.entropy_coefficient * batch.entropy if options.entropy_coefficient else loss
    if options.entropy_coefficient:
        raise ConfigError(
            f"entropy_coefficient = {options.entropy_coefficient}, but the batch has no entropy",
            remedy="Set entropy_coefficient = 0, or choose a trainer that gives the entropy.",
            code="VIME-CONFIG-022",
        )
    return loss
