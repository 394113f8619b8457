from __future__ import annotations

import math
import statistics
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vime_core.rl.advantages import (
    DrGrpoOptions,
    ReinforceOptions,
    dr_grpo,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
)
from vime_core.rl.reduction import token_weights
from vime_core.rl.selection import informative, overlong_penalty, without_overlong
from vime_core.types import FinishReason, Sample

reward = st.floats(min_value=-10, max_value=10, width=32)
groups = st.integers(2, 5).flatmap(
    lambda size: st.lists(st.lists(reward, min_size=size, max_size=size), min_size=1, max_size=4)
)


def standardised(values: list[float]) -> list[float]:
    mean, spread = statistics.fmean(values), statistics.stdev(values)
    return [(value - mean) / (spread + 1e-6) for value in values]


@given(groups)
def test_dr_grpo_is_the_reward_against_the_groups_mean(rewards: list[list[float]]) -> None:
    found = dr_grpo(torch.tensor(rewards), DrGrpoOptions())
    expected = [[r - statistics.fmean(group) for r in group] for group in rewards]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@given(groups)
def test_reinforce_takes_the_batch_as_baseline(rewards: list[list[float]]) -> None:
    found = reinforce_plus_plus(torch.tensor(rewards), ReinforceOptions()).reshape(-1)
    flat = [r for group in rewards for r in group]
    if statistics.stdev(flat) > 1e-3:
        np.testing.assert_allclose(found, standardised(flat), rtol=1e-4, atol=1e-4)


@given(groups)
def test_with_a_group_baseline_the_spread_is_the_batchs(rewards: list[list[float]]) -> None:
    found = reinforce_plus_plus_baseline(torch.tensor(rewards), ReinforceOptions()).reshape(-1)
    flat = [r - statistics.fmean(group) for group in rewards for r in group]
    if statistics.stdev(flat) > 1e-3:
        np.testing.assert_allclose(found, standardised(flat), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("estimate", [reinforce_plus_plus, reinforce_plus_plus_baseline])
def test_equal_rewards_give_exact_zeros(estimate: Any) -> None:
    assert estimate(torch.full((3, 7), 0.3), ReinforceOptions()).eq(0).all()


def samples(*rewards: float) -> list[Any]:
    return [SimpleNamespace(reward=reward) for reward in rewards]


def test_a_group_has_a_signal_when_its_rewards_differ() -> None:
    assert informative(samples(0.0, 1.0, 0.0))
    assert not informative(samples(1.0, 1.0, 1.0))
    assert informative(samples(1.0, math.nextafter(1.0, 2.0)))


def test_a_dropped_response_gives_its_group_no_signal() -> None:
    group: list[Any] = [
        SimpleNamespace(reward=reward, finish_reason=reason)
        for reward, reason in ((0.0, "length"), (1.0, "stop"), (1.0, "stop"))
    ]
    assert informative(group)
    assert not informative(group, dropped=True)
    assert not informative(group[:2], dropped=True)
    assert not informative(group[:1], dropped=True)
    group[1].reward = 0.5
    assert informative(group, dropped=True)


def test_only_a_response_that_was_cut_off_is_masked() -> None:
    def sample(reason: FinishReason) -> Sample:
        return Sample(0, 0, 0, (1,), (2, 3), np.zeros(2, np.float32), (True, False), 0.0, 0, reason, 0)

    kept, cut, aborted = without_overlong([sample("stop"), sample("length"), sample("abort")])
    assert (kept.loss_mask, cut.loss_mask, aborted.loss_mask) == ((True, False), (False, False), (True, False))


def test_constant_weights_depend_on_no_length() -> None:
    weights = token_weights("constant", [[True] * 3, [True, False], [True]], 8)
    assert [w.tolist() for w in weights] == [[np.float32(1 / 24)] * 3, [np.float32(1 / 24), 0.0], [np.float32(1 / 24)]]


def test_a_weight_is_rounded_once_whatever_fp32_can_count() -> None:
    longest = 2**24 + 1
    assert token_weights("constant", [[True]], longest)[0].tolist() == [float(np.float32(1 / longest))]
    assert np.float32(1 / longest) != np.float32(1) / np.float32(longest)


@pytest.mark.parametrize(
    ("length", "buffer", "expected"),
    [
        (0, 4, 0.0),
        (16, 4, 0.0),
        (17, 4, -0.25),
        (18, 4, -0.5),
        (20, 4, -1.0),
        (25, 4, -1.0),
        (20, 20, -1.0),
        (5, 20, -0.25),
    ],
)
def test_a_long_response_loses_linearly(length: int, buffer: int, expected: float) -> None:
    assert overlong_penalty(length, 20, buffer) == expected
