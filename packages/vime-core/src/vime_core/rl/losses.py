"""Policy losses per token. A loss is ``(TokenBatch, options) -> TokenLoss``; how tokens are weighted and summed is
`vime_core.rl.reduction`'s business, so that a loss knows nothing of packing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor

from vime_core.errors import ConfigError
from vime_core.plugins.types import Options
from vime_core.rl.kl import KlEstimator, kl_per_token


@dataclass(frozen=True)
class TokenBatch:
    """Response tokens of a microbatch, flattened in order. All tensors are fp32 [N] on one device.

    Only ``log_probs`` carries gradients. ``reference_log_probs`` are the frozen reference model's.

    Raises:
        ValueError: a shape or dtype differs, or another tensor than ``log_probs`` requires a gradient.
    """

    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    reference_log_probs: Tensor | None = None

    def __post_init__(self) -> None:
        for name, tensor in vars(self).items():
            if tensor is not None:
                _check_tokens(name, tensor, self.log_probs.shape)


def _check_tokens(name: str, tensor: Tensor, shape: torch.Size) -> None:
    if tensor.ndim != 1 or tensor.dtype != torch.float32 or tensor.shape != shape:
        raise ValueError(f"{name} must be fp32 [{shape[0] if shape else 'N'}], got {tensor.dtype} {list(tensor.shape)}")
    if tensor.requires_grad and name != "log_probs":
        raise ValueError(f"{name} must be detached: only log_probs carries gradients")


@dataclass(frozen=True)
class TokenLoss:
    """``loss_N`` is fp32 [N] with gradients; ``metrics`` are fp32 [N] each, detached, averaged by the caller."""

    loss_N: Tensor  # noqa: N815
    metrics: Mapping[str, Tensor]


class PpoClipOptions(Options):
    """Options of `ppo_clip`."""

    clip_low: float = Field(0.2, ge=0, lt=1, description="The ratio's gradient ends below 1 - clip_low.")
    clip_high: float = Field(0.2, ge=0, allow_inf_nan=False, description="... and above 1 + clip_high.")
    kl: KlEstimator = Field("k3", description="Estimator of the KL to the reference model.")
    kl_coefficient: float = Field(0.0, ge=0, allow_inf_nan=False, description="Weight of the KL in the loss; 0: none.")


def ppo_clip(batch: TokenBatch, options: PpoClipOptions) -> TokenLoss:
    """``-min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A) + kl_coefficient * KL``, with
    ``ratio = exp(log_probs - old_log_probs)``.

    Source: PPO (arXiv 1707.06347), equation 7; the separate upper bound: DAPO (arXiv 2503.14476), section 3.1; the KL
    in the loss: DeepSeekMath (arXiv 2402.03300), equation 3.

    Metrics: ``ratio``; ``clipped_low`` and ``clipped_high``, 1 where that bound ends the gradient, else 0;
    ``approx_kl``, k3 of KL(old || policy); ``reference_kl`` where there is a reference.

    A log-ratio above 88 overflows to infinity in fp32 and is not hidden by a clamp: the trainer refuses it.

    Raises:
        ConfigError: ``kl_coefficient`` is set and the batch has no reference log-probs.
    """
    log_ratio = batch.log_probs - batch.old_log_probs
    ratio = torch.exp(log_ratio)
    low, high = 1.0 - options.clip_low, 1.0 + options.clip_high
    surrogate = torch.minimum(ratio * batch.advantages, torch.clamp(ratio, low, high) * batch.advantages)
    metrics = {
        "ratio": ratio,
        "clipped_low": ((ratio < low) & (batch.advantages < 0)).float(),
        "clipped_high": ((ratio > high) & (batch.advantages > 0)).float(),
        "approx_kl": torch.expm1(log_ratio) - log_ratio,
    }
    loss = _with_reference_kl(-surrogate, metrics, batch, options)
    return TokenLoss(loss, {name: value.detach() for name, value in metrics.items()})


def _with_reference_kl(loss: Tensor, metrics: dict[str, Tensor], batch: TokenBatch, options: PpoClipOptions) -> Tensor:
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
