from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vime_core.errors import DataError
from vime_core.rl.advantages import (
    DrGrpoOptions,
    GrpoOptions,
    ReinforceOptions,
    RlooOptions,
    dr_grpo,
    grpo,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    rloo,
)

reward = st.floats(min_value=-100, max_value=100, width=32)
groups = st.integers(2, 9).flatmap(
    lambda size: st.lists(st.lists(reward, min_size=size, max_size=size), min_size=1, max_size=5)
)
MODES = [
    lambda r: grpo(r, GrpoOptions()),
    lambda r: grpo(r, GrpoOptions(normalise_std=False)),
    lambda r: rloo(r, RlooOptions()),
]


def exact_grpo(rewards: list[float], *, divide: bool, eps: float) -> list[float]:
    exact = [Fraction(r) for r in rewards]
    mean = sum(exact) / len(exact)
    variance = sum((r - mean) ** 2 for r in exact) / (len(exact) - 1)
    scale = math.sqrt(variance) + eps if divide else 1.0
    return [float(r - mean) / scale for r in exact]


def exact_rloo(rewards: list[float]) -> list[float]:
    exact = [Fraction(r) for r in rewards]
    return [float(r - (sum(exact) - r) / (len(exact) - 1)) for r in exact]


def assert_close(actual: torch.Tensor, expected: list[list[float]]) -> None:
    assert actual.dtype == torch.float32
    np.testing.assert_allclose(actual.double().numpy(), np.array(expected), rtol=1e-6, atol=1e-12)


@given(groups, st.booleans())
def test_grpo_is_its_formula_in_exact_arithmetic(rewards: list[list[float]], divide: bool) -> None:
    expected = [exact_grpo(group, divide=divide, eps=1e-3) for group in rewards]
    assert_close(grpo(torch.tensor(rewards), GrpoOptions(normalise_std=divide, eps=1e-3)), expected)


@given(groups)
def test_rloo_is_its_formula_in_exact_arithmetic(rewards: list[list[float]]) -> None:
    assert_close(rloo(torch.tensor(rewards), RlooOptions()), [exact_rloo(group) for group in rewards])


def test_a_known_group() -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0]])
    std = math.sqrt(1 / 3)
    assert_close(grpo(rewards, GrpoOptions()), [[0.5 / (std + 1e-6) * sign for sign in (1, -1, -1, 1)]])
    assert rloo(rewards, RlooOptions()).tolist() == [
        [np.float32(2 / 3), -np.float32(2 / 3), -np.float32(2 / 3), np.float32(2 / 3)]
    ]


@pytest.mark.parametrize("estimate", MODES)
@given(value=st.floats(width=32, allow_nan=False, allow_infinity=False), size=st.integers(2, 33))
def test_equal_rewards_give_exact_zeros(estimate, value: float, size: int) -> None:
    assert (estimate(torch.full((2, size), value)) == 0).all()


def test_plain_fp32_would_not_give_zeros() -> None:
    rewards = torch.full((1, 7), 0.3)
    naive = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)
    assert naive.abs().max() > 1e-3


@pytest.mark.parametrize("estimate", MODES)
@given(rewards=groups)
def test_a_group_does_not_depend_on_its_neighbours(estimate, rewards: list[list[float]]) -> None:
    together = estimate(torch.tensor(rewards))
    for index, group in enumerate(rewards):
        assert torch.equal(together[index], estimate(torch.tensor([group]))[0])


@pytest.mark.parametrize("estimate", MODES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_is_named(estimate, bad: float) -> None:
    rewards = torch.zeros(3, 2)
    rewards[2, 1] = bad
    with pytest.raises(DataError, match="prompt 2, sample 1"):
        estimate(rewards)


@pytest.mark.parametrize("estimate", MODES)
@pytest.mark.parametrize("rewards", [torch.zeros(3), torch.zeros(3, 1), torch.zeros(3, 2, dtype=torch.float64)])
def test_wrong_shapes_and_dtypes_are_refused(estimate, rewards: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="fp32"):
        estimate(rewards)


ESTIMATORS: list[Any] = [
    (grpo, GrpoOptions()),
    (grpo, GrpoOptions(normalise_std=False)),
    (dr_grpo, DrGrpoOptions()),
    (rloo, RlooOptions()),
    (reinforce_plus_plus, ReinforceOptions()),
    (reinforce_plus_plus_baseline, ReinforceOptions()),
]
ragged = st.lists(st.lists(reward, min_size=0, max_size=5), min_size=1, max_size=5)


def padded(groups: list[list[float]], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Groups of unequal sizes scattered over rows of six; what is absent has a reward that must not count."""
    generator = np.random.default_rng(seed)
    rewards, present = np.full((len(groups), 6), 77.0, np.float32), np.zeros((len(groups), 6), bool)
    for row, group in enumerate(groups):
        places = np.sort(generator.permutation(6)[: len(group)])
        rewards[row, places], present[row, places] = group, True
    return torch.from_numpy(rewards), torch.from_numpy(present)


def over_batch(values: list[list[float]]) -> list[list[float]]:
    flat = [value for group in values for value in group]
    mean = math.fsum(flat) / len(flat)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in flat) / max(1, len(flat) - 1))
    return [[(value - mean) / (std + 1e-6) for value in group] for group in values]


def of_groups(name: str, groups: list[list[float]], divide: bool) -> list[list[float]]:
    """The formulas on lists of unequal lengths; a group of one has nothing to be compared with."""
    centred = [exact_grpo(group, divide=False, eps=0) if len(group) > 1 else [0.0] * len(group) for group in groups]
    if name == "rloo":
        return [exact_rloo(group) if len(group) > 1 else [0.0] * len(group) for group in groups]
    if name == "reinforce_plus_plus":
        return over_batch(groups)
    if name == "reinforce_plus_plus_baseline":
        return over_batch(centred)
    divided = [exact_grpo(g, divide=True, eps=1e-6) if len(g) > 1 else [0.0] * len(g) for g in groups]
    return divided if name == "grpo" and divide else centred


@pytest.mark.parametrize(("estimate", "options"), ESTIMATORS)
@given(groups=ragged, seed=st.integers(0, 99))
def test_groups_of_unequal_size_are_the_formula_on_what_is_present(
    estimate: Any, options: Any, groups: list[list[float]], seed: int
) -> None:
    if not any(groups):
        groups = [[1.0, 2.0]]
    rewards, present = padded(groups, seed)
    found = estimate(rewards, options, present)
    assert found.dtype == torch.float32
    assert torch.equal(found[~present], torch.zeros(int((~present).sum())))
    expected = of_groups(estimate.__name__, groups, getattr(options, "normalise_std", False))
    flat = [value for group in expected for value in group]
    np.testing.assert_allclose(found[present].double(), flat, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("estimate", "options"), ESTIMATORS)
@given(rewards=groups)
def test_whole_groups_are_the_same_bits_with_and_without_saying_so(
    estimate: Any, options: Any, rewards: list[list[float]]
) -> None:
    values = torch.tensor(rewards)
    assert torch.equal(estimate(values, options), estimate(values, options, torch.ones(values.shape, dtype=torch.bool)))


@pytest.mark.parametrize("estimate", MODES[1:])
def test_an_advantage_that_fp32_cannot_hold_is_named(estimate: Any) -> None:
    rewards = torch.tensor([[1.0, 2.0, 3.0], [3.4e38, -3.4e38, -3.4e38]])
    with pytest.raises(DataError, match=r"advantage of prompt 1, sample 0 of the batch is \S+e\+38, more than fp32"):
        estimate(rewards)


def test_no_prompts_have_no_advantages() -> None:
    nothing = torch.zeros(0, 2)
    found = [
        *(mode(nothing) for mode in MODES),
        dr_grpo(nothing, DrGrpoOptions()),
        reinforce_plus_plus(nothing, ReinforceOptions()),
        reinforce_plus_plus_baseline(nothing, ReinforceOptions()),
    ]
    assert [one.shape for one in found] == [nothing.shape] * 6
