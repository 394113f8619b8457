"""Reward by the scorer that a reasoning-gym task brings, in [0, 1]; some give part marks."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from vime_core.data.optional import require
from vime_core.data.reasoning import regenerate
from vime_core.plugins.types import Options
from vime_core.rewards.answers import last_number, tagged
from vime_core.rewards.types import RewardFunction, RewardInput


class ReasoningGymRewardOptions(Options):
    """Where the answer stands that the task's scorer judges."""

    answer: Literal["tag", "text", "number"] = Field(
        "tag", description="The last <answer>...</answer>, the whole response, or its last number."
    )


def make_reasoning_gym(options: ReasoningGymRewardOptions) -> RewardFunction:
    """The reward. It makes the example again from its metadata and refuses one that comes out different.

    Raises:
        PluginError: reasoning-gym is not installed.
    """
    require("reasoning_gym")

    def score(item: RewardInput) -> float:
        dataset, entry = regenerate(item.example)
        return float(dataset.task.score_answer(_answer(item.response_text, options), entry))

    return score


def _answer(response: str, options: ReasoningGymRewardOptions) -> str | None:
    """None when there is no answer, as the library's scorers expect."""
    if options.answer == "number":
        number = last_number(response)
        return None if number is None else format(number, "f")
    return (tagged(response) if options.answer == "tag" else response.strip()) or None
