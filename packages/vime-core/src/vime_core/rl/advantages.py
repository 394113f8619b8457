"""Advantage estimators over groups of responses to one prompt.

Every estimator is ``(rewards fp32 [P, G], options) -> advantages fp32 [P, G]``, P prompts with G responses each. Sums
run over the group in index order, in fp64, elementwise over prompts, with one rounding to fp32 at the end: a prompt's
advantages depend on its own rewards only, and a group of equal rewards gives exact zeros, since fp64 holds the sum of
up to 2**29 equal fp32 numbers exactly. (In fp32 the mean of seven times 0.3 is off by one ulp, and dividing that by a
standard deviation of zero plus eps makes an advantage of it.)
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


def dr_grpo(rewards_PG: Tensor, options: DrGrpoOptions) -> Tensor:  # noqa: ARG001
    """``r - mean`` of the group. With ``algorithm.reduction = "constant"`` it is Dr. GRPO.

    Source: Understanding R1-Zero-like training (arXiv 2503.20783), section 3.2.

    Raises:
        ValueError: rewards are not fp32 [P, G] with G of at least 2.
        DataError: a reward is not finite.
    """
    return grpo(rewards_PG, GrpoOptions.model_validate({"normalise_std": False}))


def reinforce_plus_plus(rewards_PG: Tensor, options: ReinforceOptions) -> Tensor:
    """``(r - mean) / (std + eps)`` over the whole batch; groups do not matter. The divisor of the variance is N - 1.

    Source: REINFORCE++ (arXiv 2501.03262), section 3: the batch as the baseline.

    Raises:
        ValueError: rewards are not fp32 [P, G] with G of at least 2.
        DataError: a reward is not finite.
    """
    return _normalised(_checked(rewards_PG).double(), options.eps)


def reinforce_plus_plus_baseline(rewards_PG: Tensor, options: ReinforceOptions) -> Tensor:
    """``r - mean`` of the group, then divided by the standard deviation of these over the whole batch.

    Source: REINFORCE++ (arXiv 2501.03262), the variant with a group baseline.

    Raises:
        ValueError: rewards are not fp32 [P, G] with G of at least 2.
        DataError: a reward is not finite.
    """
    rewards = _checked(rewards_PG).double()
    centred = rewards - (_group_sum(rewards) / rewards.shape[1])[:, None]
    return _normalised(centred, options.eps)


def _normalised(values_PG: Tensor, eps: float) -> Tensor:
    """fp32 [P, G]: centred and scaled over all values, summed in (prompt, sample) order in fp64."""
    flat = values_PG.reshape(1, -1)
    centred = flat - (_group_sum(flat) / flat.shape[1])[:, None]
    std = torch.sqrt(_group_sum(centred * centred) / (flat.shape[1] - 1))
    return (centred / (std + eps)[:, None]).reshape(values_PG.shape).float()


def grpo(rewards_PG: Tensor, options: GrpoOptions) -> Tensor:
    """Group-relative advantage: ``(r - mean) / (std + eps)``, or ``r - mean`` without ``normalise_std``.

    Source: DeepSeekMath (arXiv 2402.03300), section 4.1.2. The standard deviation is the sample's (divisor G - 1),
    as the field's trainers have it. Without it: Dr. GRPO (arXiv 2503.20783), section 3.2.

    Raises:
        ValueError: rewards are not fp32 [P, G] with G of at least 2.
        DataError: a reward is not finite.
    """
    rewards = _checked(rewards_PG).double()
    group_size = rewards.shape[1]
    centred = rewards - (_group_sum(rewards) / group_size)[:, None]
    if options.normalise_std:
        std = torch.sqrt(_group_sum(centred * centred) / (group_size - 1))
        centred = centred / (std + options.eps)[:, None]
    return centred.float()


def rloo(rewards_PG: Tensor, options: RlooOptions) -> Tensor:  # noqa: ARG001
    """Leave-one-out advantage: each reward minus the mean of the *other* rewards of its group.

    Source: Ahmadian et al., Back to Basics (arXiv 2402.14740), section 3.2.

    Raises:
        ValueError: rewards are not fp32 [P, G] with G of at least 2.
        DataError: a reward is not finite.
    """
    rewards = _checked(rewards_PG).double()
    others = (_group_sum(rewards)[:, None] - rewards) / (rewards.shape[1] - 1)
    return (rewards - others).float()


def _group_sum(values_PG: Tensor) -> Tensor:
    total = torch.zeros_like(values_PG[:, 0])
    for column in values_PG.unbind(dim=1):
        total = total + column
    return total


def _checked(rewards_PG: Tensor) -> Tensor:
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
    return rewards_PG
