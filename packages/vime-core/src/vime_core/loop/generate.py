"""Prompts to scored samples: generate, decode, reward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vime_core.loop.answers import require_answers
from vime_core.loop.prompts import Prompt
from vime_core.loop.session import Session
from vime_core.loop.timing import PhaseTimer
from vime_core.types import Completion, Sample, SampleRequest


@dataclass(frozen=True)
class Generated:
    """Scored samples, in sample order, and how many of their rewards ran out of time."""

    samples: list[Sample]
    rewards_timed_out: int


def generate_samples(
    session: Session,
    prompts: Sequence[Prompt],
    requests: Sequence[SampleRequest],
    timer: PhaseTimer,
    phases: tuple[str, str] = ("generate", "reward"),
) -> Generated:
    """Have every request answered and scored.

    Args:
        session: with engine, tokenizer and scorer.
        prompts: that the requests are of.
        requests: in sample order.
        timer: told the two ``phases``, generation and scoring.

    Raises:
        BackendError: the engine's completions are not those of the requests.
    """
    with timer(phases[0]):
        completions = session.rollout.generate(requests)
        require_answers(requests, completions, session.weight_version)
    with timer(phases[1]):
        by_index = {prompt.index: prompt for prompt in prompts}
        texts = session.decode(completions)
        scores = session.scorer.score([by_index[c.prompt_index] for c in completions], texts, completions)
        samples = [
            _sample(request, by_index[request.prompt_index], completion, reward, text)
            for request, completion, reward, text in zip(requests, completions, scores.values, texts, strict=True)
        ]
    return Generated(samples, len(scores.timed_out))


def _sample(request: SampleRequest, prompt: Prompt, completion: Completion, reward: float, text: str) -> Sample:
    return Sample(
        prompt_index=request.prompt_index,
        sample_index=request.sample_index,
        dataset_index=prompt.dataset_index,
        prompt_tokens=request.prompt_tokens,
        response_tokens=completion.tokens,
        rollout_log_probs=completion.log_probs,
        loss_mask=(True,) * len(completion.tokens),
        reward=reward,
        weight_version=completion.weight_version,
        finish_reason=completion.finish_reason,
        seed=request.seed,
        response_text=text,
        kept=completion.kept,
    )
