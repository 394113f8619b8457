"""Requests whose sequences reach as far as the context does: a fault at a late position shows in no short sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from vime_core.loop.sides import Parts
from vime_core.rl.seeds import sample_seed
from vime_core.types import SampleRequest

PARTS: Final = 4
"""Sequences end at every such part of the longest length, so that late tokens are decoded in several places."""
DECODED: Final = 256
"""Response tokens of the one request that decodes its way up to the longest length."""


def pooled_prompt(parts: Parts, length: int, start: int = 0) -> tuple[int, ...]:
    """So many tokens of the run's first prompts laid end to end, over and over."""
    pool = [token for prompt in parts.prompts.step(0) for token in prompt.tokens]
    return tuple(pool[(start + place) % len(pool)] for place in range(length))


def reaching_requests(parts: Parts, requests: Sequence[SampleRequest], longest: int = 0) -> list[SampleRequest]:
    """More requests, for sequences that are longer than those of ``requests``, up to ``longest`` tokens.

    One decodes its last `DECODED` tokens; the others have long prompts and the usual number of response tokens.

    Args:
        parts: whose context length is the limit.
        requests: what is asked for anyway.
        longest: tokens of prompt and response, at most as many as the context holds; 0: as many.
    """
    context, usual = parts.config.rollout.context_length, parts.config.sampling.max_tokens
    limit = longest or context
    reached = max(len(request.prompt_tokens) + request.max_tokens for request in requests)
    ends = [limit * part // PARTS for part in range(1, PARTS + 1)]
    lengths = [(end - usual, usual) for end in ends if end > max(reached, usual)]
    if limit > reached:
        decoded = min(DECODED, limit - min(len(request.prompt_tokens) for request in requests))
        lengths.append((limit - decoded, decoded))
    first = 1 + max(request.prompt_index for request in requests)
    return [_request(parts, requests[0], first + n, *length) for n, length in enumerate(lengths)]


def _request(parts: Parts, like: SampleRequest, index: int, prompt: int, response: int) -> SampleRequest:
    return replace(
        like,
        prompt_index=index,
        sample_index=0,
        prompt_tokens=pooled_prompt(parts, prompt, index),
        seed=sample_seed(parts.config.run.seed, -3, index, 0),
        max_tokens=response,
    )
