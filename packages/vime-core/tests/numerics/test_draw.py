"""The draw: against whole numbers of Python, its distribution, and what it promises of rows and seeds."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numerics_support import cpu, everyone, normal

from vime_core.numerics import masked
from vime_core.numerics.arithmetic import exp
from vime_core.numerics.draw import next_number, numbers

LARGEST = 2**63 - 1


def by_hand(values: list[float], u: int) -> int:
    """The definition in exact arithmetic, but for the one rounded product."""
    z = torch.tensor(values)
    weights = [int(Fraction(w) * 2**40) for w in exp(z - z.max()).tolist()]
    target = min(int((u >> 10) * 2.0**-53 * float(sum(weights))), sum(weights) - 1)
    return next(i for i in range(len(weights)) if sum(weights[: i + 1]) > target)


@given(
    st.lists(st.sampled_from([0.0, 1.0, 1.0, -30.0, -200.0]) | st.floats(-8, 8, width=32), min_size=1, max_size=40),
    st.integers(0, LARGEST) | st.sampled_from([0, LARGEST, 1 << 62]),
)
def test_every_provider_draws_what_the_definition_says(values: list[float], u: int) -> None:
    for operations in everyone().values():
        assert operations.draw(torch.tensor([values]), torch.tensor([u])).tolist() == [by_hand(values, u)]


def test_tokens_come_as_often_as_they_are_likely() -> None:
    logits, count = normal(3, 1, 7, scale=1.5), 40_000
    p = logits.double().softmax(-1)[0].numpy()
    drawn = cpu().draw(logits.expand(count, 7), numbers(11, count, torch.device("cpu")))
    found = np.bincount(drawn.numpy(), minlength=7)
    assert ((found - count * p) ** 2 / (count * p)).sum() < 27  # chi squared, 6 degrees of freedom: 1 in 10,000
    flatter = logits.double().mul(0.95).softmax(-1)[0].numpy()
    assert ((found - count * flatter) ** 2 / (count * flatter)).sum() > 27


def test_greedy_takes_the_first_of_the_largest() -> None:
    logits = torch.tensor([[1.0, 4.0, 4.0, -1.0], [math.nan, 2.0, 3.0, 3.0]])
    for operations in everyone().values():
        u = torch.tensor([LARGEST, 5])
        assert operations.draw(logits, u, 0.0).tolist() == [1, 2]
        assert operations.draw(logits, u, torch.tensor([0.0, 1.0])).tolist()[0] == 1
        assert operations.draw(logits, torch.tensor([-1, -1]), 1.0).tolist() == [1, 2]


def test_what_was_cut_is_never_drawn() -> None:
    logits = normal(0, 200, 64)
    keep = cpu().keep_mask(logits, 1.0, 3)
    drawn = cpu().draw(masked(logits, keep), numbers(1, 200, torch.device("cpu")))
    assert keep.gather(1, drawn[:, None]).all()
    assert len(set(drawn.tolist())) > 40
    nothing = torch.full((2, 9), -math.inf)
    nothing[1] = math.nan
    for operations in everyone().values():
        assert operations.draw(nothing, torch.tensor([5, LARGEST])).tolist() == [0, 0]


@pytest.mark.parametrize("seed", [0, 7, 2**62 + 5])
def test_a_requests_numbers_are_those_of_its_generator(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    one_by_one = [int(next_number(generator)) for _ in range(20)]
    assert numbers(seed, 20, torch.device("cpu")).tolist() == one_by_one
    assert all(0 <= number <= LARGEST for number in one_by_one)
    assert len(set(one_by_one)) == 20
    assert max(one_by_one) > 2**61
