"""Dual clip, GSPO and CISPO against the published formulas, case by case in fp64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from vime_core.errors import ConfigError
from vime_core.rl.losses import CispoOptions, GspoOptions, PpoClipOptions, TokenBatch, cispo, gspo, ppo_clip

log_prob = st.floats(min_value=-3, max_value=0, width=32)
advantage = st.floats(min_value=-3, max_value=3, width=32)
Row = tuple[float, float, float]
rows = st.lists(st.tuples(log_prob, log_prob, advantage), min_size=1, max_size=6)


def batch_of(tokens: list[Row], lengths: tuple[int, ...] = ()) -> TokenBatch:
    log_probs, old, advantages = torch.tensor(tokens, dtype=torch.float32).unbind(1)
    return TokenBatch(log_probs.clone().requires_grad_(), old, advantages, lengths=lengths)


def assert_gives(batch: TokenBatch, result: torch.Tensor, losses: list[float], slopes: list[float]) -> None:
    result.sum().backward()
    np.testing.assert_allclose(result.detach(), losses, rtol=3e-5, atol=3e-6)
    assert batch.log_probs.grad is not None
    np.testing.assert_allclose(batch.log_probs.grad, slopes, rtol=3e-5, atol=3e-6)


@given(rows)
def test_dual_clip_bounds_the_loss_of_a_bad_token(tokens: list[Row]) -> None:
    options = PpoClipOptions(clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    losses, slopes, kept = [], [], []
    for new, old, a in tokens:
        ratio = math.exp(new - old)
        if min(abs(ratio - bound) for bound in (0.8, 1.28, 3.0)) < 1e-4:
            continue
        kept.append((new, old, a))
        plain = min(ratio * a, min(max(ratio, 0.8), 1.28) * a)
        flat = (a > 0 and ratio > 1.28) or (a < 0 and (ratio < 0.8 or ratio > 3.0))
        losses.append(-max(plain, 3.0 * a) if a < 0 else -plain)
        slopes.append(0.0 if flat else -ratio * a)
    if kept:
        batch = batch_of(kept)
        assert_gives(batch, ppo_clip(batch, options).loss_N, losses, slopes)


@pytest.mark.parametrize("value", [0.5, 1.0, -1.0, math.inf])
def test_a_dual_clip_that_bounds_everything_is_refused(value: float) -> None:
    with pytest.raises(ValidationError):
        PpoClipOptions(dual_clip=value)


@given(st.lists(st.tuples(rows, advantage), min_size=1, max_size=4))
def test_gspo_is_the_objective_of_whole_responses(responses: list[tuple[list[Row], float]]) -> None:
    options = GspoOptions(clip_low=0.1, clip_high=0.15)
    tokens: list[Row] = []
    losses, slopes = [], []
    for response, a in responses:
        ratio = math.exp(sum(new - old for new, old, _ in response) / len(response))
        if min(abs(ratio - 0.9), abs(ratio - 1.15)) < 1e-4:
            continue
        clipped = min(ratio * a, min(max(ratio, 0.9), 1.15) * a)
        flat = (a > 0 and ratio > 1.15) or (a < 0 and ratio < 0.9)
        tokens += [(new, old, a) for new, old, _ in response]
        losses += [-clipped] * len(response)
        slopes += [0.0 if flat else -ratio * a] * len(response)
    if tokens:
        kept = [r for r, a in responses if min(abs(_ratio(r) - 0.9), abs(_ratio(r) - 1.15)) >= 1e-4]
        batch = batch_of(tokens, tuple(len(response) for response in kept))
        assert_gives(batch, gspo(batch, options).loss_N, losses, slopes)


def _ratio(response: list[Row]) -> float:
    return math.exp(sum(new - old for new, old, _ in response) / len(response))


@given(rows)
def test_gspo_gives_every_token_of_a_response_the_bits_of_one_ratio(response: list[Row]) -> None:
    """A likely and an unlikely token are clipped together; the default bounds lie within roundings of log-probs."""
    nearly = [(new, new - (old - new) * 1e-4, 1.0) for new, old, _ in response]
    ratios = gspo(batch_of(nearly, (len(nearly),)), GspoOptions()).metrics["ratio"]
    assert len(set(ratios.tolist())) == 1


def test_gspo_gives_the_gradient_of_autograd_through_the_sequence_ratio() -> None:
    tokens = [(-1.0, -1.1, 0.7), (-0.5, -0.4, 0.7), (-2.0, -2.0, 0.7)]
    batch = batch_of(tokens, (3,))
    gspo(batch, GspoOptions(clip_low=0.5, clip_high=0.5)).loss_N.sum().backward()
    direct = batch.log_probs.detach().double().requires_grad_()
    (-3 * torch.exp((direct - batch.old_log_probs.double()).mean()) * 0.7).backward()
    assert batch.log_probs.grad is not None
    assert direct.grad is not None
    np.testing.assert_allclose(batch.log_probs.grad, direct.grad, rtol=1e-5)


@given(rows)
def test_cispo_clips_the_weight_and_ends_no_gradient(tokens: list[Row]) -> None:
    batch = batch_of(tokens)
    weights = [min(max(math.exp(new - old), 0.5), 1.28) for new, old, _ in tokens]
    losses = [-w * a * new for w, (new, _, a) in zip(weights, tokens, strict=True)]
    slopes = [-w * a for w, (_, _, a) in zip(weights, tokens, strict=True)]
    result = cispo(batch, CispoOptions(clip_low=0.5, clip_high=0.28))
    assert_gives(batch, result.loss_N, losses, slopes)
    assert {*result.metrics} == {"ratio", "clipped_low", "clipped_high", "approx_kl"}


@pytest.mark.parametrize(
    ("loss", "options"), [(gspo, GspoOptions(kl_coefficient=1)), (cispo, CispoOptions(kl_coefficient=1))]
)
def test_a_kl_needs_a_reference(loss: object, options: object) -> None:
    with pytest.raises(ConfigError, match="no reference log-probs"):
        loss(batch_of([(-1.0, -1.0, 1.0)]), options)  # type: ignore[operator]


def test_lengths_that_are_not_the_batch_are_refused() -> None:
    with pytest.raises(ValueError, match="lengths sum to 3"):
        batch_of([(-1.0, -1.0, 1.0)], (1, 2))
