"""The draw: against whole numbers of Python, its distribution, and what it promises of rows and seeds."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numerics_support import cpu, everyone, normal

from vime_core.numerics import masked
from vime_core.numerics.arithmetic import exp
from vime_core.numerics.draw import numbers, philox

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


def test_one_token_ends_where_the_next_begins() -> None:
    """To one part of 2^40 of the weights' sum, so that neither their fractions nor the low bits of u are lost."""
    values = [-13.3, -12.7, -15.0, 0.0, -14.2]
    shares = [Fraction(e) * 2**40 for e in exp(torch.tensor(values)).tolist()]
    assert any(share % 1 >= Fraction(1, 2) for share in shares[:3]), "rounded weights would be the same"
    ends = list(accumulate(int(share) for share in shares))
    for token, end in enumerate(ends[:-1]):
        for target, drawn in ((end - 1, token), (end, token + 1)):
            u = math.ceil(Fraction(2 * target + 1, 2 * ends[-1]) * 2**53) << 10
            assert by_hand(values, u) == drawn
            for operations in everyone().values():
                assert operations.draw(torch.tensor([values]), torch.tensor([u])).tolist() == [drawn]


def test_a_token_without_a_number_is_never_drawn() -> None:
    numbered, u = torch.tensor([[0.5, -math.inf, 1.0, -math.inf]] * 50), numbers(2, 50, torch.device("cpu"))
    for operations in everyone().values():
        found = operations.draw(numbered.masked_fill(numbered.isinf(), math.nan), u)
        assert found.unique().tolist() == [0, 2]
        assert torch.equal(found, operations.draw(numbered, u))


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
        assert operations.kernels.draw(logits, torch.tensor([0.0, -0.0]), u).tolist() == [1, 2]


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


WORD = st.integers(0, 2**32 - 1)


def philox_by_hand(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 in whole numbers of Python, after the paper's figure: one multiplication a word, ten rounds."""
    for round_ in range(10):
        keys = [(key[i] + round_ * (0x9E3779B9, 0xBB67AE85)[i]) % 2**32 for i in range(2)]
        high, low = zip(divmod(0xD2511F53 * counter[0], 2**32), divmod(0xCD9E8D57 * counter[2], 2**32), strict=True)
        counter = [high[1] ^ counter[1] ^ keys[0], low[1], high[0] ^ counter[3] ^ keys[1], low[0]]
    return counter


def one(*words: int) -> Any:
    return tuple(torch.tensor([word]) for word in words)


PUBLISHED = [  # Random123's file of known answers
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), PUBLISHED)
def test_philox_gives_the_published_answers(counter: list[int], key: list[int], answer: list[int]) -> None:
    assert philox_by_hand(counter, key) == answer
    assert [int(word) for word in philox(one(*counter), one(*key))] == answer


@given(st.integers(-(2**63), 2**63 - 1), WORD)
def test_a_requests_numbers_are_words_of_philox(seed: int, place: int) -> None:
    first, second, _, _ = philox_by_hand([place, 0, 0, 0], [seed % 2**32, (seed >> 32) % 2**32])
    for operations in everyone().values():
        assert operations.draw_numbers(*one(seed, place)).tolist() == [(first * 2**32 + second) // 2]


@pytest.mark.parametrize("seed", [0, 7, 7 + 2**32, 2**63 - 1])
def test_numbers_are_a_function_of_seed_and_place(seed: int) -> None:
    found = numbers(seed, 4000, torch.device("cpu"))
    places = torch.tensor([3999, 0, 17])
    assert torch.equal(cpu().draw_numbers(torch.full((3,), seed), places), found[places])
    assert len(set(found.tolist())) == 4000
    assert int(found.min()) >= 0
    shares = found.double().numpy() * 2.0**-63
    assert np.abs(np.sort(shares) - np.linspace(0, 1, 4000)).max() < 2.2 / 4000**0.5  # Kolmogorov: 1 in 8,000
    assert abs(np.corrcoef(shares[:-1], shares[1:])[0, 1]) < 0.07
    assert not set(found.tolist()) & set(numbers(seed ^ (1 << 32), 4000, torch.device("cpu")).tolist())
