"""Rewards: functions of one response, run in worker processes with a time limit each.

A reward plugin's target is ``(options) -> RewardFunction``; it imports what it needs when it is called, in the worker.
"""

from __future__ import annotations

from vime_core.rewards.pool import RewardPool, Scores, score_all
from vime_core.rewards.types import RewardFunction, RewardInput, RewardSpec

__all__ = ["RewardFunction", "RewardInput", "RewardPool", "RewardSpec", "Scores", "score_all"]
