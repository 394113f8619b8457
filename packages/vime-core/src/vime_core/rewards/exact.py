"""Reward 1 for the right number or string, else 0."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from vime_core.errors import DataError
from vime_core.plugins.types import Options
from vime_core.rewards.answers import last_number, normalised, tagged
from vime_core.rewards.types import RewardFunction, RewardInput


class ExactOptions(Options):
    """What counts as equal, and where the answer stands."""

    match: Literal["number", "string"] = Field(
        "number", description="number: the last number equals the label's last, exactly; string: equal once normalised."
    )
    answer: Literal["text", "tag"] = Field("text", description="The whole response, or its last <answer>...</answer>.")


def make_exact(options: ExactOptions) -> RewardFunction:
    """The reward. It raises DataError for a label without a number where numbers are compared."""

    def score(item: RewardInput) -> float:
        answer = tagged(item.response_text) if options.answer == "tag" else item.response_text
        if options.match == "string":
            return float(normalised(answer) == normalised(item.example.label))
        return float(last_number(answer) == _expected_number(item.example.label))

    return score


def _expected_number(label: str) -> object:
    expected = last_number(label)
    if expected is None:
        raise DataError(
            f"label {label!r} has no number to compare with",
            remedy="Set reward.exact.match = 'string', or correct the dataset.",
            code="VIME-DATA-017",
        )
    return expected
