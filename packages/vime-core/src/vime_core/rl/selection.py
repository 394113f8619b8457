"""Which samples are trained on: groups with a signal, and responses that were not cut off; what too long ones lose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vime_core.types import Sample


def informative(group: Sequence[Sample], *, dropped: bool = False) -> bool:
    """Whether rewards of a prompt's samples differ: only then has a group-relative advantage a signal.

    Source: DAPO (arXiv 2503.14476), section 3.2.

    Args:
        group: the samples of one prompt.
        dropped: responses that ran into their limit have no part in the advantages, so they are not judged.
    """
    return len({sample.reward for sample in group if not (dropped and sample.finish_reason == "length")}) > 1


def without_overlong(samples: Sequence[Sample]) -> list[Sample]:
    """The same samples; of a response that ran into its limit no token is trained on.

    Source: overlong filtering, DAPO (arXiv 2503.14476), section 3.4.
    """
    return [
        replace(sample, loss_mask=(False,) * len(sample.loss_mask)) if sample.finish_reason == "length" else sample
        for sample in samples
    ]


def overlong_penalty(length: int, longest: int, buffer: int) -> float:
    """0 up to ``longest - buffer`` tokens, from there falling linearly to -1 at ``longest``.

    Source: soft overlong punishment, DAPO (arXiv 2503.14476), equation 13.

    Args:
        length: tokens of a response.
        longest: that a response may have.
        buffer: the last tokens before ``longest``, at least 1.
    """
    return -min(1.0, max(0, length - (longest - buffer)) / buffer)
