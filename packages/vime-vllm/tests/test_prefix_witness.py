"""An honest cache always passes; one that survives a reset is always found when it is used."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vime_core.errors import ContractViolation
from vime_vllm.prefix_witness import PrefixWitness, Served

BLOCK = 4
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=14)
CALLS = st.lists(st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=5), min_size=1, max_size=4)


class Cache:
    """A prefix cache as an engine has it: a request takes the longest cached prefix, never its last token."""

    def __init__(self) -> None:
        self.blocks: set[tuple[int, ...]] = set()

    def serve(self, prompt: list[int], response: list[int]) -> Served:
        cached = 0
        while cached + BLOCK < len(prompt) and tuple(prompt[: cached + BLOCK]) in self.blocks:
            cached += BLOCK
        tokens = (*prompt, *response)
        self.blocks |= {tokens[:end] for end in range(BLOCK, len(tokens) + 1, BLOCK)}
        return Served(prompt, response, cached)


@settings(max_examples=200, deadline=None)
@given(CALLS, st.data())
def test_an_honest_cache_passes(calls: list[list[tuple[list[int], list[int]]]], data: st.DataObject) -> None:
    cache, witness = Cache(), PrefixWitness(BLOCK)
    for call in calls:
        if data.draw(st.booleans()):
            cache.blocks.clear()
            witness.reset()
        witness.check([cache.serve(*one) for one in call])


@settings(max_examples=200, deadline=None)
@given(CALLS, CALLS)
def test_a_cache_that_survives_a_reset_is_found(
    before: list[list[tuple[list[int], list[int]]]], after: list[list[tuple[list[int], list[int]]]]
) -> None:
    cache, fresh, witness = Cache(), Cache(), PrefixWitness(BLOCK)
    for call in before:
        witness.check([cache.serve(*one) for one in call])
    witness.reset()
    stale = False
    for call in after:
        served = [cache.serve(*one) for one in call]
        honest = [fresh.serve(*one) for one in call]
        stale = stale or any(s.cached > h.cached for s, h in zip(served, honest, strict=True))
        if stale:
            with pytest.raises(ContractViolation, match="never filled"):
                witness.check(served)
            return
        witness.check(served)


def test_the_same_prompt_again_after_a_reset() -> None:
    cache, witness = Cache(), PrefixWitness(BLOCK)
    prompt = [1] * 9
    witness.check([cache.serve(prompt, [0])])
    witness.check([cache.serve(prompt, [1])])
    witness.reset()
    with pytest.raises(ContractViolation, match="request 0 took 8 prompt tokens"):
        witness.check([cache.serve(prompt, [0])])
