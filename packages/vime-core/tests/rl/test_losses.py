from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from vime_core.errors import ConfigError
from vime_core.rl.losses import PpoClipOptions, TokenBatch, TokenLoss, ppo_clip

log_prob = st.floats(min_value=-5, max_value=0, width=32)
advantage = st.floats(min_value=-3, max_value=3, width=32)
tokens = st.lists(st.tuples(log_prob, log_prob, advantage, log_prob), min_size=1, max_size=8)
OPTIONS = PpoClipOptions(clip_low=0.2, clip_high=0.28, kl="k3", kl_coefficient=0.1)


def batch_of(rows: list[tuple[float, float, float, float]]) -> TokenBatch:
    log_probs, old, advantages, reference = torch.tensor(rows, dtype=torch.float32).unbind(1)
    return TokenBatch(log_probs.clone().requires_grad_(), old, advantages, reference)


def ratio_batch(ratio: float, advantage: float) -> TokenBatch:
    log_probs = torch.tensor([math.log(ratio)], requires_grad=True)
    return TokenBatch(log_probs, torch.zeros(1), torch.tensor([advantage]))


def direct(row: tuple[float, float, float, float], options: PpoClipOptions) -> tuple[float, float]:
    """Loss and its derivative in the policy's log-prob, case by case in fp64."""
    log_prob, old, advantage, reference = row
    ratio = math.exp(log_prob - old)
    outside = (advantage > 0 and ratio > 1 + options.clip_high) or (advantage < 0 and ratio < 1 - options.clip_low)
    bound = 1 + options.clip_high if advantage > 0 else 1 - options.clip_low
    loss = -(bound if outside else ratio) * advantage
    slope = 0.0 if outside else -ratio * advantage
    k3 = math.exp(reference - log_prob) - 1 - (reference - log_prob)
    k3_slope = 1 - math.exp(reference - log_prob)
    return loss + options.kl_coefficient * k3, slope + options.kl_coefficient * k3_slope


def near_a_bound(row: tuple[float, float, float, float]) -> bool:
    ratio = math.exp(row[0] - row[1])
    return abs(ratio - 0.8) < 1e-4 or abs(ratio - 1.28) < 1e-4


@given(tokens)
def test_loss_and_gradient_are_the_formula(rows: list[tuple[float, float, float, float]]) -> None:
    rows = [row for row in rows if not near_a_bound(row)] or [(-1.0, -1.5, 1.0, -1.2)]
    batch = batch_of(rows)
    result = ppo_clip(batch, OPTIONS)
    result.loss_N.sum().backward()
    expected = [direct(row, OPTIONS) for row in rows]
    np.testing.assert_allclose(result.loss_N.detach(), [loss for loss, _ in expected], rtol=3e-5, atol=3e-6)
    assert batch.log_probs.grad is not None
    np.testing.assert_allclose(batch.log_probs.grad, [slope for _, slope in expected], rtol=3e-5, atol=3e-6)


def gradient(batch: TokenBatch, options: PpoClipOptions) -> tuple[TokenLoss, float]:
    result = ppo_clip(batch, options)
    (slope,) = torch.autograd.grad(result.loss_N.sum(), batch.log_probs)
    return result, slope.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "low", "high"),
    [(1.25, 1.0, 0, 0), (1.3, 1.0, 0, 1), (1.3, -1.0, 0, 0), (0.7, -1.0, 1, 0), (0.7, 1.0, 0, 0), (0.85, -1.0, 0, 0)],
)
def test_the_two_bounds_end_the_gradient_on_their_own_side(ratio: float, advantage: float, low: int, high: int) -> None:
    result, slope = gradient(ratio_batch(ratio, advantage), PpoClipOptions(clip_low=0.2, clip_high=0.28))
    assert (result.metrics["clipped_low"].item(), result.metrics["clipped_high"].item()) == (low, high)
    assert (slope == 0.0) == bool(low or high)


def test_the_upper_bound_is_its_own() -> None:
    assert gradient(ratio_batch(1.25, 1.0), PpoClipOptions(clip_high=0.28))[1] != 0.0
    assert gradient(ratio_batch(1.25, 1.0), PpoClipOptions(clip_high=0.2))[1] == 0.0


def test_on_policy_the_loss_is_exactly_minus_the_advantage() -> None:
    log_probs = torch.tensor([-0.3, -2.7], requires_grad=True)
    advantages = torch.tensor([0.7, -1.3])
    result = ppo_clip(TokenBatch(log_probs, log_probs.detach(), advantages), PpoClipOptions())
    result.loss_N.sum().backward()
    assert torch.equal(result.loss_N, -advantages)
    assert log_probs.grad is not None
    assert torch.equal(log_probs.grad, -advantages)
    assert torch.equal(result.metrics["ratio"], torch.ones(2))
    assert torch.equal(result.metrics["approx_kl"], torch.zeros(2))


def test_a_bound_counts_where_it_ends_a_gradient_only() -> None:
    """Not at the bound itself, nor where the advantage is 0."""
    on_policy = TokenBatch(torch.zeros(2, requires_grad=True), torch.zeros(2), torch.tensor([1.0, -1.0]))
    metrics = ppo_clip(on_policy, PpoClipOptions(clip_low=0.0, clip_high=0.0)).metrics
    assert (metrics["clipped_low"].sum(), metrics["clipped_high"].sum()) == (0, 0)
    for ratio in (0.5, 2.0):
        metrics = ppo_clip(ratio_batch(ratio, 0.0), PpoClipOptions()).metrics
        assert (metrics["clipped_low"].item(), metrics["clipped_high"].item()) == (0, 0)


def test_the_approximate_kl_is_that_of_the_old_policy() -> None:
    """k3 with r = policy / old, of tokens that the old policy sampled."""
    assert ppo_clip(ratio_batch(2.0, 1.0), PpoClipOptions()).metrics["approx_kl"].item() == pytest.approx(
        1 - math.log(2)
    )


def test_metrics_carry_no_gradients_and_one_value_a_token() -> None:
    result = ppo_clip(batch_of([(-1.0, -1.5, 1.0, -1.2), (-2.0, -1.5, -1.0, -1.2)]), OPTIONS)
    assert set(result.metrics) == {"ratio", "clipped_low", "clipped_high", "approx_kl", "reference_kl"}
    assert all(value.shape == (2,) and not value.requires_grad for value in result.metrics.values())


def test_a_reference_without_coefficient_is_reported_but_not_in_the_loss() -> None:
    rows = [(-1.0, -1.5, 1.0, -4.2)]
    without = ppo_clip(batch_of(rows), PpoClipOptions(kl_coefficient=0.0))
    log_probs, old, advantages, _ = torch.tensor(rows).unbind(1)
    assert torch.equal(without.loss_N, ppo_clip(TokenBatch(log_probs, old, advantages), PpoClipOptions()).loss_N)
    assert without.metrics["reference_kl"].item() > 1


@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
def test_the_chosen_estimator_is_in_the_loss(kl: str) -> None:
    rows = [(-1.0, -1.0, 0.0, -2.0)]
    result = ppo_clip(batch_of(rows), PpoClipOptions(kl=kl, kl_coefficient=0.5))  # pyright: ignore
    expected = {"k1": 1.0, "k2": 0.5, "k3": math.exp(-1.0)}[kl]
    assert result.loss_N.item() == pytest.approx(0.5 * expected, rel=1e-6)


def test_a_coefficient_without_reference_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"kl_coefficient = 0\.1"):
        ppo_clip(ratio_batch(1.0, 1.0), OPTIONS)


def test_overflow_is_not_hidden() -> None:
    log_probs = torch.tensor([0.0], requires_grad=True)
    result = ppo_clip(TokenBatch(log_probs, torch.tensor([-100.0]), torch.tensor([-1.0])), PpoClipOptions())
    assert not torch.isfinite(result.loss_N).all()


@pytest.mark.parametrize(
    ("old", "message"),
    [
        (torch.zeros(3), "old_log_probs must be fp32"),
        (torch.zeros(2, dtype=torch.float64), "old_log_probs must be fp32"),
        (torch.zeros(2, 1), "old_log_probs must be fp32"),
        (torch.zeros(2, requires_grad=True), "old_log_probs must be detached"),
    ],
)
def test_a_wrong_batch_is_refused(old: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TokenBatch(torch.zeros(2), old, torch.zeros(2))


@pytest.mark.parametrize(
    "bad", [{"clip_low": 1.0}, {"clip_high": -0.1}, {"kl": "k4"}, {"kl_coefficient": float("nan")}, {"clip": 0.2}]
)
def test_options_are_checked(bad: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        PpoClipOptions.model_validate(bad)
