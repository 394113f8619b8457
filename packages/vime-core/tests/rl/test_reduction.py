from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vime_core.errors import DataError
from vime_core.rl.reduction import Reduction, token_weights

masks = st.lists(st.lists(st.booleans(), max_size=12), min_size=1, max_size=8).filter(lambda m: any(map(any, m)))
REDUCTIONS: list[Reduction] = ["token", "sample"]


def expected(reduction: str, masks: list[list[bool]], sample: int, token: int) -> np.float32:
    if not masks[sample][token]:
        return np.float32(0)
    tokens_of_sample = len([kept for kept in masks[sample] if kept])
    tokens_of_batch = len([kept for mask in masks for kept in mask if kept])
    denominator = tokens_of_batch if reduction == "token" else len(masks) * tokens_of_sample
    return np.float32(float(Fraction(1, denominator)))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@given(masks=masks)
def test_weights_are_the_formula_bit_for_bit(reduction: Reduction, masks: list[list[bool]]) -> None:
    weights = token_weights(reduction, masks)
    assert [len(w) for w in weights] == [len(m) for m in masks]
    for i, row in enumerate(weights):
        assert row.dtype == np.float32
        assert row.tobytes() == b"".join(expected(reduction, masks, i, j).tobytes() for j in range(len(row)))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@given(masks=masks, data=st.data())
def test_weights_follow_their_sample_in_any_order(
    reduction: Reduction, masks: list[list[bool]], data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(masks))))
    weights = token_weights(reduction, masks)
    permuted = token_weights(reduction, [masks[i] for i in order])
    assert [w.tobytes() for w in permuted] == [weights[i].tobytes() for i in order]


def test_token_counts_every_token_alike_and_sample_every_sample() -> None:
    masks = [[True] * 3, [True]]
    assert [w.tolist() for w in token_weights("token", masks)] == [[0.25] * 3, [0.25]]
    assert [w.sum() for w in token_weights("sample", masks)] == pytest.approx([0.5, 0.5])


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_the_loss_is_that_of_the_batch_whatever_the_packing(reduction: Reduction) -> None:
    lengths = [3, 1, 7, 2]
    losses = [np.linspace(i, i + 1, length) for i, length in enumerate(lengths)]
    weights = token_weights(reduction, [[True] * length for length in lengths])
    whole = np.concatenate(losses).mean() if reduction == "token" else np.mean([row.mean() for row in losses])
    for packing in ([[0, 1, 2, 3]], [[0, 1], [2, 3]], [[0], [1], [2], [3]]):
        packed = sum(float((weights[i] * losses[i]).sum()) for microbatch in packing for i in microbatch)
        assert packed == pytest.approx(whole, rel=1e-6)
    mean_of_means = np.mean([np.concatenate([losses[i] for i in pair]).mean() for pair in ([0, 1], [2, 3])])
    assert mean_of_means != pytest.approx(whole, rel=1e-3)


def test_a_sample_without_tokens_still_counts_as_a_sample() -> None:
    weights = token_weights("sample", [[True, True], [False], []])
    assert weights[0].tolist() == [np.float32(1 / 6)] * 2
    assert (weights[1].tolist(), weights[2].tolist()) == ([0.0], [])


@pytest.mark.parametrize("masks", [[], [[]], [[False, False], []]])
def test_nothing_to_train_on_is_an_error(masks: list[list[bool]]) -> None:
    with pytest.raises(DataError, match="response token"):
        token_weights("token", masks)
