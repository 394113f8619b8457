"""Is every token the one that its request's seed draws from the trainer's distribution?

Log-probs say what tokens are worth. An engine that takes the likeliest token, draws at another temperature, with
another seed or among more tokens than it was asked to, and then scores what it took by the right distribution, is found
here alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from vime_core.types import Drawn, KeptTokens, SampleKey
from vime_core.verify.matching import Scored, sample_name


@dataclass(frozen=True)
class DrawComparison:
    """So many tokens were drawn again, so many came out otherwise; ``place`` and ``what`` say which is the first."""

    compared: int = 0
    unequal: int = 0
    place: str = ""
    what: str = ""


def compare_draws(engine: Sequence[Scored], drawn: Mapping[SampleKey, Drawn]) -> DrawComparison:
    """Token by token, and what was left to choose from there; a token that was not drawn again is unequal."""
    found = [(one, token) for one in engine for token in range(len(one.tokens))]
    others = [(one, token, what) for one, token in found if (what := _difference(one, drawn.get(one.key), token))]
    if not others:
        return DrawComparison(len(found))
    one, token, what = others[0]
    return DrawComparison(len(found), len(others), f"{sample_name(one.key)}, token {token}", what)


def _difference(one: Scored, again: Drawn | None, token: int) -> str:
    if again is None or token >= len(again.tokens):
        return "the trainer did not draw it again"
    ours, theirs = (_left(kept, token) for kept in (again.kept, one.kept))
    if ours != theirs:
        return f"the engine drew from {_among(theirs)}, where top-k and top-p leave {_among(ours)}"
    if again.tokens[token] != one.tokens[token]:
        return (
            f"the engine returned token {one.tokens[token]}, where the request's seed draws token"
            f" {again.tokens[token]} from the trainer's distribution"
        )
    return ""


def _left(kept: KeptTokens, token: int) -> tuple[int, ...]:
    """Ids that were left at a response token; none: all."""
    if not kept.counts:
        return ()
    ends = list(accumulate(kept.counts))
    return kept.tokens[ends[token] - kept.counts[token] : ends[token]]


def _among(ids: tuple[int, ...]) -> str:
    if not ids:
        return "all tokens"
    more = ", ..." if len(ids) > 3 else ""
    return f"{len(ids)} tokens ({', '.join(map(str, ids[:3]))}{more})"
