"""Advantage estimators over groups of responses to one prompt.

Every estimator is ``(rewards fp32 [P, G], options, present bool [P, G] or None) -> advantages fp32 [P, G]``, P prompts
with at most G responses each: an absent one has no part in any mean or spread and advantage 0; so has the only one of a
group that is compared within its group. Sums run over the group in index order, in fp64, elementwise over prompts, with
one rounding to fp32 at the end: a prompt's advantages depend on its own rewards only, and a group of equal rewards
gives exact zeros, since fp64 holds the sum of up to 2**29 equal fp32 numbers exactly. (In fp32 the mean of seven times
0.3 is off by one ulp, and dividing that by a standard deviation of zero plus eps makes an advantage of it.)
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from vime_core.errors import DataError
from vime_core.plugins.types import Options


class GrpoOptions(Options):
    """Options of `grpo`."""

    normalise_std: bool = Field(True, description="Divide by the group's standard deviation; False: Dr. GRPO.")
    eps: float = Field(1e-6, gt=0, allow_inf_nan=False, description="Added to the standard deviation.")


class RlooOptions(Options):
    """`rloo` has no options."""


class DrGrpoOptions(Options):
    """`dr_grpo` has no options."""


class ReinforceOptions(Options):
    """Options of `reinforce_plus_plus` and `reinforce_plus_plus_baseline`."""

    eps: float = Field(1e-6, gt=0, allow_inf_nan=False, description="Added to the batch's standard deviation.")


def dr_grpo(rewards_PG: Tensor, options: DrGrpoOptions, present_PG: Tensor | None = None) -> Tensor:  # noqa: ARG001
    """``r - mean`` of the group. With ``algorithm.reduction = "constant"`` it is Dr. GRPO.

    Source: Understanding R1-Zero-like training (arXiv 2503.20783), section 3.2.

    Raises:
        ValueError: rewards are not fp32 [P, G] with G of at least 2.
        DataError: a reward is not finite, or an advantage is no fp32.
    """
    return grpo(rewards_PG, GrpoOptions.model_validate({"normalise_std": False}), present_PG)


def reinforce_plus_plus(rewards_PG: Tensor, options: ReinforceOptions, present_PG: Tensor | None = None) -> Tensor:
    """``(r - mean) / (std + eps)`` over the whole batch; groups do not matter. The divisor of the variance is N - 1.

    Source: REINFORCE++ (arXiv 2501.03262), section 3: the batch as the baseline.

    Raises:
        ValueError: rewards are not fp32 [P, G] with G of at least 2.
        DataError: a reward is not finite, or an advantage is no fp32.
    """
    return _normalised(*_checked(rewards_PG, present_PG), options.eps)


def reinforce_plus_plus_baseline(
    rewards_PG: Tensor, options: ReinforceOptions, present_PG: Tensor | None = None
) -> Tensor:
    """``r - mean`` of the group, then divided by the standard deviation of these over the whole batch.

    Source: REINFORCE++ (arXiv 2501.03262), the variant with a group baseline.

    Raises:
        ValueError: rewards are not fp32 [P, G] with G of at least 2.
        DataError: a reward is not finite, or an advantage is no fp32.
    """
    rewards, present = _checked(rewards_PG, present_PG)
    return _normalised(_centred(rewards, present), present, options.eps)


def _normalised(values_PG: Tensor, present_PG: Tensor, eps: float) -> Tensor:
    """fp32 [P, G]: centred and scaled over all values, summed in (prompt, sample) order in fp64."""
    flat, present = values_PG.reshape(1, -1), present_PG.reshape(1, -1)
    centred = _centred(flat, present)
    return _rounded((centred / (_spread(centred, present) + eps)[:, None]).reshape(values_PG.shape))


def grpo(rewards_PG: Tensor, options: GrpoOptions, present_PG: Tensor | None = None) -> Tensor:
    """Group-relative advantage: ``(r - mean) / (std + eps)``, or ``r - mean`` without ``normalise_std``.

    Source: DeepSeekMath (arXiv 2402.03300), section 4.1.2. The standard deviation is the sample's (divisor G - 1),
    as the field's trainers have it. Without it: Dr. GRPO (arXiv 2503.20783), section 3.2.

    Raises:
        ValueError: rewards are not fp32 [P, G] with G of at least 2.
        DataError: a reward is not finite, or an advantage is no fp32.
    """
    centred = _centred(*(checked := _checked(rewards_PG, present_PG)))
    if options.normalise_std:
        centred = centred / (_spread(centred, checked[1]) + options.eps)[:, None]
    return _rounded(centred)


def rloo(rewards_PG: Tensor, options: RlooOptions, present_PG: Tensor | None = None) -> Tensor:  # noqa: ARG001
    """Leave-one-out advantage: each reward minus the mean of the *other* rewards of its group.

    Source: Ahmadian et al., Back to Basics (arXiv 2402.14740), section 3.2.

    Raises:
        ValueError: rewards are not fp32 [P, G] with G of at least 2.
        DataError: a reward is not finite, or an advantage is no fp32.
    """
    rewards, present = _checked(rewards_PG, present_PG)
    counts = present.double().sum(1, keepdim=True)
    others = (_group_sum(rewards)[:, None] - rewards) / (counts - 1).clamp(min=1)
    return _rounded(torch.where(present & (counts > 1), rewards - others, 0.0))


def _rounded(advantages_PG: Tensor) -> Tensor:
    """In fp32. Raises DataError where that cannot hold one."""
    rounded = advantages_PG.float()
    bad = (~torch.isfinite(rounded)).nonzero()
    if len(bad):
        prompt, sample = int(bad[0, 0]), int(bad[0, 1])
        raise DataError(
            f"the advantage of prompt {prompt}, sample {sample} of the batch is"
            f" {advantages_PG[prompt, sample].item():.3g}, more than fp32 can hold",
            remedy="Scale the rewards down, or choose an estimator that divides by their spread.",
            code="VIME-DATA-023",
        )
    return rounded


def _centred(values_PG: Tensor, present_PG: Tensor) -> Tensor:
    """Each value minus the mean of its row's present ones; 0 where it is absent."""
    mean = _group_sum(values_PG) / present_PG.double().sum(1).clamp(min=1)
    return torch.where(present_PG, values_PG - mean[:, None], 0.0)


def _spread(centred_PG: Tensor, present_PG: Tensor) -> Tensor:
    """The sample's standard deviation of each row (divisor: present ones minus 1), 0 of a single value."""
    return torch.sqrt(_group_sum(centred_PG * centred_PG) / (present_PG.double().sum(1) - 1).clamp(min=1))


def _group_sum(values_PG: Tensor) -> Tensor:
    total = values_PG.new_zeros(len(values_PG))
    for column in values_PG.unbind(dim=1):
        total = total + column
    return total


def _checked(rewards_PG: Tensor, present_PG: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rewards in fp64, 0 where they are absent, and which are present."""
    if rewards_PG.ndim != 2 or rewards_PG.dtype != torch.float32 or rewards_PG.shape[1] < 2:
        raise ValueError(
            f"rewards must be fp32 [P, G] with G >= 2, got {rewards_PG.dtype} {list(rewards_PG.shape)}"
            " (sampling.samples_per_prompt must be at least 2)"
        )
    bad = (~torch.isfinite(rewards_PG)).nonzero()
    if len(bad):
        prompt, sample = int(bad[0, 0]), int(bad[0, 1])
        raise DataError(
            f"reward of prompt {prompt}, sample {sample} of the batch is {rewards_PG[prompt, sample].item()}",
            remedy="Correct the reward function; advantages need finite rewards.",
            code="VIME-DATA-022",
        )
    present = torch.ones_like(rewards_PG, dtype=torch.bool) if present_PG is None else present_PG
    return torch.where(present, rewards_PG.double(), 0.0), present
