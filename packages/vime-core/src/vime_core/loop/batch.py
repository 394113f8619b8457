"""A step's scored samples: requests of the next prompts in order, answers, rewards, and which of them train."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vime_core.errors import DataError
from vime_core.loop.generate import generate_samples
from vime_core.loop.prompts import Prompt, require_distinct_seeds, training_requests
from vime_core.loop.session import Session
from vime_core.loop.timing import PhaseTimer
from vime_core.rl.selection import informative, without_overlong
from vime_core.types import Sample


@dataclass(frozen=True)
class StepSamples:
    """A step's scored samples, in sample order, how many rewards ran out of time, and how many groups were left out."""

    samples: list[Sample]
    rewards_timed_out: int
    left_out: int = 0


def step_samples(session: Session, step: int, timer: PhaseTimer) -> StepSamples:
    """The samples that step ``step`` trains on; `Session.next_prompt` then stands behind the last of their prompts.

    With dynamic sampling, groups without a signal are left out and the next prompts follow, in order. A prompt that was
    answered but not needed counts as not taken: it comes again in the next step, under the weights of that step. So
    nothing sampled is carried over, and the place in the order of prompts is all that a checkpoint holds.

    Raises:
        DataError: ``sampling.dynamic_rounds`` rounds did not give enough groups with a signal.
    """
    rounds, wanted = session.config.sampling.dynamic_rounds, session.config.sampling.prompts_per_step
    dropped = session.config.algorithm.overlong == "drop"
    kept: list[list[Sample]] = []
    timed_out = left_out = 0
    for _ in range(max(rounds, 1)):
        first = session.next_prompt
        groups, late = _round(session, step, session.prompts.take(first, wanted), timer)
        timed_out += late
        for group in groups:
            session.next_prompt += 1
            if not rounds or informative(group, dropped=dropped):
                kept.append(group)
            else:
                left_out += 1
            if len(kept) == wanted:
                return StepSamples([sample for one in kept for sample in one], timed_out, left_out)
    raise DataError(
        f"step {step}: {rounds} rounds of {wanted} prompts gave {len(kept)} groups whose rewards differ, and"
        f" sampling.prompts_per_step = {wanted}",
        remedy="Raise sampling.dynamic_rounds or samples_per_prompt, or use prompts of another difficulty.",
        code="VIME-DATA-025",
    )


def _round(session: Session, step: int, prompts: Sequence[Prompt], timer: PhaseTimer) -> tuple[list[list[Sample]], int]:
    """The groups of some prompts, in order, and how many of their rewards ran out of time."""
    requests = training_requests(session.config, step, prompts)
    require_distinct_seeds(requests)
    found = generate_samples(session, prompts, requests, timer)
    samples = without_overlong(found.samples) if session.config.algorithm.overlong != "keep" else found.samples
    size = session.config.sampling.samples_per_prompt
    return [samples[i : i + size] for i in range(0, len(samples), size)], found.rewards_timed_out
