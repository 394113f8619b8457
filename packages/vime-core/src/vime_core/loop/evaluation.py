"""Evaluation during a run: the same prompts each time, greedy unless configured."""

from __future__ import annotations

import math
from collections.abc import Sequence

from vime_core.loop.generate import generate_samples
from vime_core.loop.prompts import evaluation_requests
from vime_core.loop.session import Session
from vime_core.loop.timing import PhaseTimer
from vime_core.types import Sample


def evaluate(session: Session, step: int, timer: PhaseTimer) -> list[Sample]:
    """The scored responses of the evaluation before step ``step`` when one is due, else none."""
    every = session.config.evaluation.every
    if session.evaluation is None or every == 0 or step % every:
        return []
    prompts = session.evaluation.first(session.config.evaluation.prompts)
    requests = evaluation_requests(session.config, prompts)
    return generate_samples(session, prompts, requests, timer, ("evaluation", "evaluation")).samples


def evaluation_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Mean reward and length; nothing without samples."""
    if not samples:
        return {}
    return {
        "evaluation/reward": math.fsum(sample.reward for sample in samples) / len(samples),
        "evaluation/response_length": sum(len(sample.response_tokens) for sample in samples) / len(samples),
    }
