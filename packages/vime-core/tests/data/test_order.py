from __future__ import annotations

from collections import Counter

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from vime_core.data.order import epoch_order, prompt_indices

sizes = st.integers(1, 30)
seeds = st.integers(0, 2**40)


def independent_order(size: int, seed: int, epoch: int) -> list[int]:
    key = blake3(str(seed).encode(), derive_key_context="vime data order v1").digest()
    ranks = [int.from_bytes(blake3(f"{epoch},{i}".encode(), key=key).digest()[:8], "little") for i in range(size)]
    return [i for _, i in sorted(zip(ranks, range(size), strict=True))]


@given(sizes, seeds, st.integers(0, 5))
def test_an_epoch_is_the_written_permutation(size: int, seed: int, epoch: int) -> None:
    order = epoch_order(size, seed, epoch)
    assert list(order) == independent_order(size, seed, epoch)
    assert sorted(order) == list(range(size))


@given(sizes, seeds, st.integers(1, 13))
def test_steps_walk_through_epochs_without_gap_or_repeat(size: int, seed: int, per_step: int) -> None:
    pairs = [pair for step in range(3 * size // per_step + 1) for pair in prompt_indices(size, seed, step, per_step)]
    assert [index for index, _ in pairs] == list(range(len(pairs)))
    for epoch in range(len(pairs) // size):
        block = pairs[epoch * size : (epoch + 1) * size]
        assert [dataset_index for _, dataset_index in block] == list(epoch_order(size, seed, epoch))


def test_a_step_does_not_depend_on_steps_before_it() -> None:
    expected = [prompt_indices(50, 3, step, 8) for step in range(40)]
    epoch_order.cache_clear()
    assert [prompt_indices(50, 3, step, 8) for step in reversed(range(40))] == expected[::-1]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = {epoch_order(50, seed, epoch) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_every_place_is_about_equally_likely() -> None:
    firsts = Counter(epoch_order(4, 0, epoch)[0] for epoch in range(2000))
    assert all(abs(firsts[i] - 500) < 100 for i in range(4))


def test_unshuffled_order_is_the_file_s() -> None:
    assert prompt_indices(3, 9, 1, 4, shuffle=False) == [(4, 1), (5, 2), (6, 0), (7, 1)]


def test_more_prompts_than_examples_span_epochs() -> None:
    assert len(prompt_indices(2, 0, 0, 7)) == 7


@pytest.mark.parametrize("arguments", [(0, 0, 0, 1), (1, 0, 0, 0), (1, 0, -1, 1)])
def test_impossible_arguments_are_refused(arguments: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="no prompts"):
        prompt_indices(*arguments)
