"""The entropy and its gradient against torch's own distribution in fp64, and what the losses make of it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import Categorical

from vime_core.errors import ConfigError
from vime_core.rl import entropy
from vime_core.rl.entropy import token_entropies
from vime_core.rl.losses import CispoOptions, GspoOptions, PpoClipOptions, TokenBatch, cispo, gspo, ppo_clip

LOSSES: list[Any] = [(ppo_clip, PpoClipOptions), (gspo, GspoOptions), (cispo, CispoOptions)]


def direct(logits: Tensor, temperature: float, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Entropies and the gradient of their weighted sum, by torch's distribution in fp64."""
    exact = logits.double().requires_grad_()
    values = Categorical(logits=exact / (temperature or 1.0)).entropy()
    (values * weights).sum().backward()
    assert exact.grad is not None
    return values.detach(), exact.grad


@given(st.integers(0, 999), st.integers(1, 7), st.integers(1, 40), st.sampled_from([0.0, 0.7, 1.0, 2.5]))
def test_value_and_gradient_are_the_definition(seed: int, rows: int, vocabulary: int, temperature: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = (4 * torch.randn(rows, vocabulary, generator=generator)).requires_grad_()
    weights = torch.randn(rows, generator=generator)
    values = token_entropies(logits, temperature)
    (values * weights).sum().backward()
    expected, slope = direct(logits.detach(), temperature, weights)
    assert values.dtype == torch.float32
    torch.testing.assert_close(values.double(), expected, rtol=1e-5, atol=1e-5)
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad.double(), slope, rtol=1e-4, atol=1e-5)


def test_chunks_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(9, 11, generator=torch.Generator().manual_seed(3)).bfloat16()
    results = []
    for elements in (1 << 22, 22):
        monkeypatch.setattr(entropy, "CHUNK_ELEMENTS", elements)
        own = logits.clone().requires_grad_()
        values = token_entropies(own, 1.0)
        values.square().sum().backward()
        assert own.grad is not None
        assert own.grad.dtype == torch.bfloat16
        results.append((values.detach(), own.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_what_was_cut_is_not_in_the_distribution() -> None:
    logits = torch.tensor([[0.0, -math.inf, 0.0], [-math.inf, 5.0, -math.inf]], requires_grad=True)
    values = token_entropies(logits, 1.0)
    values.sum().backward()
    torch.testing.assert_close(values.detach(), torch.tensor([math.log(2), 0.0]))
    assert logits.grad is not None
    assert torch.equal(logits.grad, torch.zeros(2, 3))


@pytest.mark.parametrize(("loss", "options"), LOSSES)
def test_a_loss_rewards_entropy_by_its_coefficient(loss: Any, options: Any) -> None:
    log_probs, held = torch.tensor([-1.0, -2.0]).requires_grad_(), torch.tensor([1.5, 0.25]).requires_grad_()
    batch = TokenBatch(log_probs, torch.tensor([-1.1, -1.9]), torch.tensor([1.0, -1.0]), entropy=held)
    plain, rewarded = loss(batch, options()), loss(batch, options(entropy_coefficient=0.1))
    assert torch.equal(rewarded.loss_N, plain.loss_N - 0.1 * held)
    assert torch.autograd.grad(rewarded.loss_N.sum(), held)[0].tolist() == pytest.approx([-0.1, -0.1])
    assert torch.equal(plain.metrics["entropy"], held)
    assert not rewarded.metrics["entropy"].requires_grad


@pytest.mark.parametrize(("loss", "options"), LOSSES)
def test_a_batch_without_entropy_is_refused(loss: Any, options: Any) -> None:
    zeros = torch.zeros(1)
    with pytest.raises(ConfigError, match=r"entropy_coefficient = 0.1, but the batch has no entropy"):
        loss(TokenBatch(zeros, zeros, zeros), options(entropy_coefficient=0.1))
