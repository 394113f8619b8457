"""What a reward function sees, and how it is named so that another process can build it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pydantic import BaseModel

from vime_core.data.types import Example
from vime_core.plugins.types import Options
from vime_core.types import FinishReason, SampleKey


@dataclass(frozen=True)
class RewardInput:
    """One response to score. ``key`` (prompt index, sample index) names it in errors."""

    prompt_text: str
    response_text: str
    example: Example
    finish_reason: FinishReason = "stop"
    key: SampleKey | None = None


RewardFunction = Callable[[RewardInput], float]
"""A finite number, representable in fp32, that depends on the input only."""


@dataclass(frozen=True)
class RewardSpec:
    """A reward by name: ``target`` ("module:attribute") called with ``options`` gives the `RewardFunction`."""

    target: str
    options: BaseModel = field(default_factory=Options)
