"""The loss that gradients are checked with: everything that a training sequence brings enters it, token by token.

    L = sum over tokens of w (-S + 0.1 k3),  S = min(r A, clip(r, 0.8, 1.2) A), at least 3 A where A < 0,
    r = exp(log p - old log p),  k3 = e^d - d - 1,  d = reference log p - log p

The trainer gets it as `vime_core.rl.losses.ppo_clip`; the reference as the formula, written out here in its own
precision. Ratios lie far from every bound, so that rounding moves no token across one.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from vime_core.types import Float32Array, KeptTokens, TrainSequence

if TYPE_CHECKING:
    from torch import Tensor

    from vime_core.rl.losses import TokenBatch, TokenLoss

CLIP: Final = 0.2
"""How far below and above 1 a ratio's gradient ends."""
DUAL: Final = 3.0
KL: Final = 0.1
LOG_RATIOS: Final = (0.02, -0.6, 0.6, -0.02, 1.5)
"""Of policy to old policy, in turns: both inside the bounds, both outside, and where the dual bound ends it."""
REFERENCE_LOG_RATIOS: Final = (0.4, -0.3, 0.1)
KEPT: Final = 7
"""Tokens that stand beside the sampled one where a sequence has a set to choose from."""


def trained(batch: TokenBatch) -> TokenLoss:
    """The loss as a trainer takes it."""
    from vime_core.rl.losses import PpoClipOptions, ppo_clip

    bounds = {"clip_low": CLIP, "clip_high": CLIP, "dual_clip": DUAL}
    options = PpoClipOptions.model_validate({**bounds, "kl": "k3", "kl_coefficient": KL})
    return ppo_clip(batch, options)


def written_out(log_probs: Tensor, sequence: TrainSequence) -> Tensor:
    """The loss of each response token, without its weight, [R] in the precision of ``log_probs``."""
    import torch

    def like(values: Float32Array | None) -> Tensor:
        return log_probs.detach() if values is None else torch.from_numpy(values).to(log_probs.dtype)

    advantages = like(sequence.advantages)
    ratio = (log_probs - like(sequence.old_log_probs)).exp()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    surrogate = torch.where(advantages < 0, torch.maximum(surrogate, DUAL * advantages), surrogate)
    away = like(sequence.reference_log_probs) - log_probs
    return KL * (away.exp() - away - 1) - surrogate


def of_every_token(sequence: TrainSequence, number: int, pool: Sequence[int]) -> TrainSequence:
    """The sequence with another advantage and weight at each token, some of weight 0; odd ones with kept tokens."""
    place = np.arange(sequence.response_length)
    signs = np.where((place // len(LOG_RATIOS) + number) % 2, 1.0, -1.0)
    advantages = signs * (0.5 + 0.5 * (place % 3))
    weights = sequence.weights * (0.5 * ((7 * place + number) % 4))
    kept = _kept(sequence, pool) if number % 2 else sequence.kept
    arrays = {"advantages": advantages.astype(np.float32), "weights": weights.astype(np.float32)}
    return replace(sequence, kept=kept, **arrays)


def with_policies(sequence: TrainSequence, scored: Float32Array, number: int) -> TrainSequence:
    """The sequence with old and reference log-probs, which lie around what the trainer scored."""
    place = np.arange(len(scored)) + number
    ratios, references = (np.array(values, dtype=np.float32) for values in (LOG_RATIOS, REFERENCE_LOG_RATIOS))
    old, reference = scored - ratios[place % len(ratios)], scored + references[place % len(references)]
    return replace(sequence, old_log_probs=old, reference_log_probs=reference)


def _kept(sequence: TrainSequence, pool: Sequence[int]) -> KeptTokens:
    """At two of three tokens the sampled one and up to `KEPT` of the pool; the whole vocabulary at the third."""
    sets: list[list[int]] = []
    for place, token in enumerate(sequence.tokens[sequence.response_start :]):
        others = {pool[(place * 11 + 3 * n) % len(pool)] for n in range(KEPT)}
        sets.append(sorted({token, *others}) if place % 3 else [])
    return KeptTokens(tuple(token for ids in sets for token in ids), tuple(map(len, sets)))
