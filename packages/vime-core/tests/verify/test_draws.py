"""Tokens against what is drawn again: every way in which one may differ."""

from __future__ import annotations

import numpy as np
import pytest

from vime_core.types import WHOLE_VOCABULARY, Drawn, KeptTokens
from vime_core.verify.draws import compare_draws
from vime_core.verify.matching import Scored

KEPT = KeptTokens((1, 2, 5, 3, 4), (3, 0, 2))


def scored(tokens: tuple[int, ...] = (5, 9, 3), kept: KeptTokens = KEPT) -> Scored:
    return Scored((1, 0), tokens, np.zeros(len(tokens), dtype=np.float32), 0, kept)


def drawn(tokens: tuple[int, ...], kept: KeptTokens = WHOLE_VOCABULARY) -> Drawn:
    return Drawn(tokens, np.zeros(len(tokens), dtype=np.float32), kept)


def test_equal_tokens_from_equal_sets() -> None:
    found = compare_draws([scored()], {(1, 0): drawn((5, 9, 3), KEPT)})
    assert (found.compared, found.unequal, found.what) == (3, 0, "")
    whole = compare_draws([scored(kept=WHOLE_VOCABULARY)], {(1, 0): drawn((5, 9, 3))})
    assert (whole.compared, whole.unequal) == (3, 0)


@pytest.mark.parametrize(
    ("again", "place", "words"),
    [
        (drawn((5, 8, 3), KEPT), 1, "returned token 9, where the request's seed draws token 8"),
        (drawn((5, 9, 3), KeptTokens((1, 2, 3, 4), (2, 0, 2))), 0, "drew from 3 tokens (1, 2, 5), where"),
        (drawn((5, 9, 3), KeptTokens((1, 2, 5, 6, 3, 4), (4, 0, 2))), 0, "drew from 3 tokens (1, 2, 5), where"),
        (drawn((5, 9, 3), KeptTokens((1, 2, 6, 3, 4), (3, 0, 2))), 0, "top-k and top-p leave 3 tokens (1, 2, 6)"),
        (drawn((5, 9, 3)), 0, "where top-k and top-p leave all tokens"),
        (drawn((5, 9), KEPT), 2, "the trainer did not draw it again"),
    ],
)
def test_what_differs_is_named(again: Drawn, place: int, words: str) -> None:
    found = compare_draws([scored()], {(1, 0): again})
    assert found.unequal >= 1
    assert found.place == f"prompt 1, sample 0, token {place}"
    assert words in found.what


def test_a_sample_that_was_not_drawn_again_is_unequal() -> None:
    assert compare_draws([scored()], {}).unequal == 3
