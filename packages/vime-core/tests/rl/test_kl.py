from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vime_core.rl.kl import KlEstimator, kl_per_token

log_prob = st.floats(min_value=-20, max_value=0, width=32)
pairs = st.lists(st.tuples(log_prob, log_prob), min_size=1, max_size=8)


def direct(estimator: str, policy: float, reference: float) -> float:
    ratio = math.exp(reference - policy)
    return {"k1": policy - reference, "k2": (policy - reference) ** 2 / 2, "k3": ratio - 1 + policy - reference}[
        estimator
    ]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@given(pairs=pairs)
def test_estimators_are_their_formulas(estimator: KlEstimator, pairs: list[tuple[float, float]]) -> None:
    policy, reference = torch.tensor(pairs).unbind(1)
    expected = [direct(estimator, *pair) for pair in pairs]
    np.testing.assert_allclose(kl_per_token(estimator, policy, reference), expected, rtol=2e-5, atol=2e-6)


@given(pairs=pairs)
def test_k2_and_k3_are_never_negative(pairs: list[tuple[float, float]]) -> None:
    policy, reference = torch.tensor(pairs).unbind(1)
    assert (kl_per_token("k2", policy, reference) >= 0).all()
    assert (kl_per_token("k3", policy, reference) >= 0).all()


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@given(value=log_prob)
def test_equal_models_have_exactly_none(estimator: KlEstimator, value: float) -> None:
    log_probs = torch.tensor([value])
    assert kl_per_token(estimator, log_probs, log_probs.clone()).item() == 0.0


def expected_value_and_gradient(estimator: KlEstimator) -> tuple[float, torch.Tensor]:
    """Over all tokens of a small vocabulary, weighted by the policy, as sampling would on average."""
    logits = torch.tensor([0.3, -1.0, 0.7, 0.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.0, 0.5, -0.2, 0.4], dtype=torch.float64).log_softmax(0)
    policy = logits.log_softmax(0)
    values = kl_per_token(estimator, policy, reference)
    (gradient,) = torch.autograd.grad((policy.exp().detach() * values).sum(), logits)
    return (policy.exp() * values).sum().item(), gradient


def true_value_and_gradient() -> tuple[float, torch.Tensor]:
    logits = torch.tensor([0.3, -1.0, 0.7, 0.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.0, 0.5, -0.2, 0.4], dtype=torch.float64).log_softmax(0)
    policy = logits.log_softmax(0)
    divergence = (policy.exp() * (policy - reference)).sum()
    (gradient,) = torch.autograd.grad(divergence, logits)
    return divergence.item(), gradient


def test_what_the_documentation_says_of_bias() -> None:
    value, gradient = true_value_and_gradient()
    by_name = {name: expected_value_and_gradient(name) for name in ("k1", "k2", "k3")}
    assert by_name["k1"][0] == pytest.approx(value, rel=1e-12)
    assert by_name["k3"][0] == pytest.approx(value, rel=1e-12)
    assert by_name["k2"][0] != pytest.approx(value, rel=1e-3)
    assert torch.allclose(by_name["k1"][1], torch.zeros(4, dtype=torch.float64), atol=1e-15)
    assert torch.allclose(by_name["k2"][1], gradient, rtol=1e-12)
    assert not torch.allclose(by_name["k3"][1], gradient, rtol=1e-3)
