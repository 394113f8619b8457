"""Pack sequences into microbatches of a token budget, as a function of lengths and budget only."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

from vime_core.errors import DataError


def pack(lengths: Sequence[int], token_budget: int) -> tuple[tuple[int, ...], ...]:
    """Group sequence indices so that each group's tokens fit the budget.

    Best-fit decreasing (Johnson, Near-optimal bin packing algorithms, 1973; at most 11/9 of the optimum plus a
    constant): longest first, ties by index, each into the fullest microbatch that holds it, ties by the microbatch's
    age. Then indices ascend within a microbatch, and microbatches ascend by their first index.

    Args:
        lengths: tokens of each sequence, prompt and response.
        token_budget: most tokens of one microbatch.

    Raises:
        DataError: a sequence alone exceeds the budget.
        ValueError: a length is not positive.
    """
    microbatches: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, microbatch), ascending: the first that fits is the fullest
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = _checked(index, lengths[index], token_budget)
        place = bisect_left(room, (length, 0))
        if place == len(room):
            free, microbatch = token_budget, len(microbatches)
            microbatches.append([])
        else:
            free, microbatch = room.pop(place)
        microbatches[microbatch].append(index)
        insort(room, (free - length, microbatch))
    return tuple(sorted(tuple(sorted(indices)) for indices in microbatches))


def _checked(index: int, length: int, token_budget: int) -> int:
    if length <= 0:
        raise ValueError(f"sequence {index} has length {length}; lengths must be positive")
    if length > token_budget:
        raise DataError(
            f"sequence {index} has {length} tokens, more than a microbatch of trainer.token_budget = {token_budget}",
            remedy=f"Set trainer.token_budget to at least {length}, or lower sampling.max_tokens.",
            code="VIME-DATA-031",
        )
    return length
