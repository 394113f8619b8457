"""Rewards that raise, hang, end their process, or return what is no number."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from vime_core.plugins import Reward, hookimpl
from vime_core.plugins.types import Options
from vime_core.rewards import RewardFunction, RewardInput


@hookimpl
def vime_rewards() -> Iterator[Reward]:
    for name in ("raises", "hangs", "dies", "nan", "text"):
        yield Reward(name, f"A reward that {name}.", f"rewards_that_fail:make_{name}")
    yield Reward("takes-two", "A reward with another signature.", "rewards_that_fail:make_takes_two")
    yield Reward("no-factory", "A reward that is not there.", "rewards_that_fail:no_such_factory")


def make_raises(options: Options) -> RewardFunction:
    def score(item: RewardInput) -> float:
        if item.response_text == item.example.label:  # the trial before the run
            return 0.0
        raise KeyError("the grader lost its key")

    return score


def make_takes_two(options: Options) -> RewardFunction:
    return lambda _prompt, _response: 0.0  # type: ignore[return-value,arg-type]


def make_hangs(options: Options) -> RewardFunction:
    def score(item: RewardInput) -> float:
        time.sleep(3600)
        return 0.0

    return score


def make_dies(options: Options) -> RewardFunction:
    def score(item: RewardInput) -> float:
        os._exit(9)

    return score


def make_nan(options: Options) -> RewardFunction:
    return lambda _: float("nan")


def make_text(options: Options) -> RewardFunction:
    return lambda _: "one"  # type: ignore[return-value,arg-type]
