from __future__ import annotations

import numpy as np
import pytest

from vime_core.verify.temperature import fit_temperature


def case(temperature: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    logits = rng.normal(scale=3, size=(9, 50)).astype(np.float32)
    tokens = rng.integers(0, 50, 9)
    z = logits.astype(np.float64) / temperature
    log_probs = z - np.log(np.exp(z).sum(axis=1, keepdims=True))
    return logits, tokens, log_probs[np.arange(9), tokens].astype(np.float32)


@pytest.mark.parametrize("temperature", [0.25, 0.7, 0.99, 1.0, 1.01, 1.3, 4.0])
def test_the_temperature_is_found(temperature: float) -> None:
    fit = fit_temperature(*case(temperature))
    assert fit.temperature == pytest.approx(temperature, rel=1e-4)
    assert fit.explains


def test_other_log_probs_are_not_explained() -> None:
    logits, tokens, log_probs = case(1.0)
    log_probs[4] += 0.01
    assert not fit_temperature(logits, tokens, log_probs).explains
    assert not fit_temperature(logits, np.roll(tokens, 1), log_probs).explains
