"""Proof that no prefix came from a cache of older weights: every cached block was computed since the last reset."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vime_core.errors import ContractViolation

Tokens = Sequence[int]


@dataclass(frozen=True)
class Served:
    """One finished request: prompt, response, and how many prompt tokens the engine took from its prefix cache."""

    prompt: Tokens
    response: Tokens
    cached: int


class PrefixWitness:
    """Remembers which blocks of tokens the current weights computed.

    An engine that kept its cache across an update would serve some prefix that nobody computed since: the first
    request that has it would already find it cached. (An old block that the current weights computed once more, as
    the end of a response, is beyond this witness.)

    Args:
        block_size: tokens of one cache block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._computed: set[int] = set()

    def reset(self) -> None:
        """The engine dropped its cache."""
        self._computed.clear()

    def check(self, served: Sequence[Served]) -> None:
        """Check the requests of one call, in the order in which the engine admitted them (first come, first served).

        Raises:
            ContractViolation: a prefix came from the cache though nothing computed it since the last reset.
        """
        for number, one in enumerate(served):
            chain = self._chain((*one.prompt, *one.response))
            taken = one.cached // self._block_size
            if not self._computed.issuperset(chain[:taken]):
                raise ContractViolation(
                    f"request {number} took {one.cached} prompt tokens from a prefix cache that the current weights"
                    " never filled",
                    remedy="The engine kept its prefix cache across a weight update; the run stops before training on"
                    " such a sample. Set rollout.vllm.enable_prefix_caching = false to go on.",
                    code="VIME-ALIGN-062",
                )
            self._computed.update(chain[taken:])

    def _chain(self, tokens: tuple[int, ...]) -> list[int]:
        """A hash for each whole block, of all tokens up to its end."""
        chain: list[int] = []
        before = 0
        for end in range(self._block_size, len(tokens) + 1, self._block_size):
            before = hash((before, tokens[end - self._block_size : end]))
            chain.append(before)
        return chain
