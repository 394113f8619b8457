"""Evaluation during a run: the same prompts of each set each time, greedy unless configured."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from vime_core.backends import DrawingRollout, DrawingTrainer
from vime_core.config.schema import RunConfig
from vime_core.loop.aligned import require_aligned, require_drawn
from vime_core.loop.generate import generate_samples
from vime_core.loop.metrics import ABS_DIFF
from vime_core.loop.prompts import Prompt
from vime_core.loop.session import Session
from vime_core.loop.streams import EvaluationStream
from vime_core.loop.timing import PhaseTimer
from vime_core.rl.seeds import sample_seed
from vime_core.types import Drawn, Sample, SampleRequest, scoring_sequence

Evaluated = Mapping[str, Sequence[Sample]]
"""Scored responses by evaluation set, in the order of the configuration; the unnamed set's name is empty."""


def evaluate(session: Session, step: int, timer: PhaseTimer) -> Evaluated:
    """The scored responses of the evaluation before step ``step`` when one is due, else none.

    Prompt indices go on from set to set, so that all responses of an evaluation have their place in one order.
    """
    every = session.config.evaluation.every
    if every == 0 or step % every:
        return {}
    phases = ("evaluation", "evaluation")
    return {
        name: generate_samples(session, prompts, requests, timer, phases).samples
        for name, prompts, requests in _sets(session)
    }


def _sets(session: Session) -> Iterator[tuple[str, list[Prompt], list[SampleRequest]]]:
    """Name, prompts and requests of each evaluation set."""
    first = 0
    for number, one in enumerate(session.evaluation):
        prompts = [replace(prompt, index=first + prompt.index) for prompt in one.prompts]
        yield one.name, prompts, evaluation_requests(session.config, one, number, prompts)
        first += len(prompts)


def evaluated_again(session: Session, samples: Sequence[Sample]) -> list[Drawn]:
    """What the trainer says of an evaluation's responses, in their order; nothing without a contract."""
    trainer = session.trainer
    if not samples or not session.config.alignment.contract or not isinstance(trainer, DrawingTrainer):
        return []
    sequences = [scoring_sequence(s.key, s.prompt_tokens, s.response_tokens, s.kept) for s in samples]
    microbatches = session.algorithm.microbatches(sequences)
    asked = {request.key: request for _, _, requests in _sets(session) for request in requests}
    keys = [sequence.key for microbatch in microbatches for sequence in microbatch]
    drawn = dict(zip(keys, trainer.draw_again(microbatches, asked), strict=True))
    return [drawn[sample.key] for sample in samples]


def distance_metrics(samples: Sequence[Sample], again: Sequence[Drawn]) -> dict[str, float]:
    """How far the trainer's log-probs of an evaluation are from the engine's; nothing where it was not asked."""
    if not again:
        return {}
    engine = np.concatenate([sample.rollout_log_probs.astype(np.float64) for sample in samples])
    trainer = np.concatenate([one.log_probs.astype(np.float64) for one in again])
    return {f"evaluation/{ABS_DIFF}": float(np.abs(engine - trainer).mean())}


def require_aligned_evaluation(session: Session, step: int, samples: Sequence[Sample], again: Sequence[Drawn]) -> None:
    """Hold an evaluation to the contract: the trainer's log-probs, and the tokens that it draws, are the engine's.

    Raises:
        ContractViolation: one is not.
    """
    if not again:
        return
    contract, where = session.config.alignment.contract, f"the evaluation before step {step}"
    require_aligned(contract, where, samples, [one.log_probs for one in again])
    if isinstance(session.rollout, DrawingRollout) and session.rollout.draws_by_contract():
        require_drawn(contract, where, samples, again)


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
