"""Reward by math-verify: 1 when the response's mathematical answer equals the label's, else 0."""

from __future__ import annotations

import logging
from typing import Any

from pydantic import Field, PositiveInt

from vime_core.data.optional import require
from vime_core.errors import DataError
from vime_core.plugins.types import Options
from vime_core.rewards.types import RewardFunction, RewardInput


class MathVerifyOptions(Options):
    """How close is equal."""

    float_rounding: PositiveInt = Field(6, description="Decimal places that two numbers are compared to.")


def make_math_verify(options: MathVerifyOptions) -> RewardFunction:
    """The reward. Call it where the caller limits its time: in a reward worker.

    math-verify's own time limits are switched off: one that strikes scores the response 0, silently, and on a slower
    machine earlier. Here the worker's limit decides, which is an error or a recorded choice (`RewardPool`).

    Raises:
        PluginError: math-verify is not installed.
    """
    library = require("math_verify")
    logging.getLogger("math_verify").setLevel(logging.ERROR)

    def score(item: RewardInput) -> float:
        gold = _parse_label(library, item.example.label)
        answer: Any = library.parse(item.response_text, parsing_timeout=None)
        equal = library.verify(gold, answer, float_rounding=options.float_rounding, timeout_seconds=None)
        return float(equal)

    return score


def _parse_label(library: Any, label: str) -> Any:
    # In a box the whole label is parsed; bare, math-verify would pick a number out of it.
    parsed: Any = library.parse(label if "\\boxed" in label else f"\\boxed{{{label}}}", parsing_timeout=None)
    if not parsed:
        raise DataError(
            f"math-verify finds no mathematical expression in label {label!r}",
            remedy="Correct the dataset, or choose reward.name = 'exact'.",
            code="VIME-DATA-018",
        )
    return parsed
