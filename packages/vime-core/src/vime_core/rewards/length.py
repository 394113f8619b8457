"""Reward for the length of a response in characters: dense and cheap, to shape length or to try a run out."""

from __future__ import annotations

from pydantic import Field, PositiveInt

from vime_core.plugins.types import Options
from vime_core.rewards.types import RewardFunction, RewardInput


class LengthOptions(Options):
    """The length to aim at."""

    target: PositiveInt = Field(20, description="Characters of the best response.")


def make_length(options: LengthOptions) -> RewardFunction:
    """The reward: 1 at the target, falling linearly to 0 at no character and at twice the target."""

    def score(item: RewardInput) -> float:
        distance = abs(len(item.response_text) - options.target)
        return max(0.0, 1.0 - distance / options.target)

    return score
