"""Evaluation during a run: the same prompts each time, greedy unless configured."""

from __future__ import annotations

import math

from vime_core.loop.prompts import evaluation_requests
from vime_core.loop.session import Session
from vime_core.loop.timing import PhaseTimer


def evaluate(session: Session, step: int, timer: PhaseTimer) -> dict[str, float]:
    """Mean reward and length before step ``step`` when one is due, else nothing."""
    every = session.config.evaluation.every
    if session.evaluation is None or every == 0 or step % every:
        return {}
    prompts = session.evaluation.first(session.config.evaluation.prompts)
    with timer("evaluation"):
        completions = session.rollout.generate(evaluation_requests(session.config, prompts))
        texts = session.decode(completions)
        rewards = session.scorer.score(prompts, texts, completions).values
    return {
        "evaluation/reward": math.fsum(rewards) / len(rewards),
        "evaluation/response_length": sum(len(c.tokens) for c in completions) / len(completions),
    }
