"""An engine's completions are those of the requests, or the run ends before anything is scored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from vime_core.errors import BackendError
from vime_core.loop.answers import require_answers
from vime_core.types import Completion, SampleRequest

REQUESTS = [SampleRequest(3, sample, (1, 2), seed=sample, max_tokens=4, temperature=1.0) for sample in range(3)]
ANSWERS = [Completion(3, n, (5, 6), np.array([-1.0, -2.0], dtype=np.float32), "length", 7) for n in range(3)]


def test_answers_in_their_order_pass() -> None:
    require_answers(REQUESTS, ANSWERS, 7)
    require_answers([], [], 7)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda a: a[:2], "missing sample: prompt 3, sample 2"),
        (lambda a: a[:0], "missing sample: prompt 3, sample 0"),
        (lambda a: [*a, a[1]], "duplicated sample: prompt 3, sample 1: the engine answered it 2 times"),
        (lambda a: [*a, replace(a[0], prompt_index=9)], "foreign sample: prompt 9, sample 0"),
        (lambda a: [a[1], a[0], a[2]], "collection order: prompt 3, sample 1: the engine answered it at place 0"),
        (
            lambda a: [*a[:2], replace(a[2], tokens=(5,))],
            "dropped token: prompt 3, sample 2: the engine has 2 log-probs for 1 tokens",
        ),
        (
            lambda a: [replace(a[0], weight_version=6), *a[1:]],
            "weight version: prompt 3, sample 0: the engine computed it with weight version 6, not 7",
        ),
    ],
)
def test_others_are_named(change: Callable[[list[Completion]], list[Completion]], what: str) -> None:
    with pytest.raises(BackendError, match=f"of 3 requests; {what}"):
        require_answers(REQUESTS, change(ANSWERS), 7)
