"""Evaluation during a run: the same prompts of each set each time, greedy unless configured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from vime_core.config.schema import RunConfig
from vime_core.loop.generate import generate_samples
from vime_core.loop.prompts import Prompt
from vime_core.loop.session import Session
from vime_core.loop.streams import EvaluationStream
from vime_core.loop.timing import PhaseTimer
from vime_core.rl.seeds import sample_seed
from vime_core.types import Sample, SampleRequest

Evaluated = Mapping[str, Sequence[Sample]]
"""Scored responses by evaluation set, in the order of the configuration; the unnamed set's name is empty."""


def evaluate(session: Session, step: int, timer: PhaseTimer) -> Evaluated:
    """The scored responses of the evaluation before step ``step`` when one is due, else none.

    Prompt indices go on from set to set, so that all responses of an evaluation have their place in one order.
    """
    every = session.config.evaluation.every
    if every == 0 or step % every:
        return {}
    evaluated: dict[str, Sequence[Sample]] = {}
    first = 0
    for number, one in enumerate(session.evaluation):
        prompts = [replace(prompt, index=first + prompt.index) for prompt in one.prompts]
        requests = evaluation_requests(session.config, one, number, prompts)
        evaluated[one.name] = generate_samples(session, prompts, requests, timer, ("evaluation", "evaluation")).samples
        first += len(prompts)
    return evaluated


def evaluation_requests(
    config: RunConfig, one: EvaluationStream, number: int, prompts: Sequence[Prompt]
) -> list[SampleRequest]:
    """One request a prompt of set ``number`` (from 0); seeds do not depend on the step, so evaluations compare."""
    return [
        SampleRequest(
            prompt_index=prompt.index,
            sample_index=0,
            prompt_tokens=prompt.tokens,
            seed=sample_seed(config.run.seed, -1 - number, place, 0),
            max_tokens=one.max_tokens,
            temperature=one.temperature,
            stop_token_ids=config.sampling.stop_token_ids,
        )
        for place, prompt in enumerate(prompts)
    ]


def evaluation_metrics(evaluated: Evaluated) -> dict[str, float]:
    """Of each set ``evaluation/NAME/...``, of the unnamed ``evaluation/...``: mean reward and length, share cut off."""
    metrics: dict[str, float] = {}
    for name, samples in evaluated.items():
        prefix, count = f"evaluation/{name}/" if name else "evaluation/", len(samples)
        metrics[f"{prefix}reward"] = math.fsum(sample.reward for sample in samples) / count
        metrics[f"{prefix}response_length"] = sum(len(sample.response_tokens) for sample in samples) / count
        metrics[f"{prefix}truncated"] = sum(sample.finish_reason == "length" for sample in samples) / count
    return metrics
