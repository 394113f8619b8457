from __future__ import annotations

import pytest
import torch

from vime_megatron import log_prob
from vime_megatron.log_prob import token_log_probs


def make(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(50, 97, generator=generator)).to(dtype)
    return logits, torch.randint(0, 97, (50,), generator=generator)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_values_and_gradients_agree_with_fp64(temperature: float) -> None:
    logits, targets = make()
    mine, other = logits.clone().requires_grad_(), logits.double().requires_grad_()
    ours = token_log_probs(mine, targets, temperature)
    theirs = (other / (temperature or 1.0)).log_softmax(-1)[torch.arange(50), targets]
    assert ours.dtype == torch.float32
    assert torch.allclose(ours.double(), theirs, atol=2e-6)
    upstream = torch.randn(50, generator=torch.Generator().manual_seed(1))
    ours.backward(upstream)
    theirs.backward(upstream.double())
    assert mine.grad is not None
    assert other.grad is not None
    assert torch.allclose(mine.grad.double(), other.grad, atol=1e-6)


def test_temperature_matters() -> None:
    logits, targets = make()
    assert not torch.allclose(token_log_probs(logits, targets, 0.7), token_log_probs(logits, targets, 1.0), atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_change_no_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for elements in (1, 97 * 7, 1 << 22):
        monkeypatch.setattr(log_prob, "CHUNK_ELEMENTS", elements)
        logits, targets = make(dtype)
        logits.requires_grad_()
        values = token_log_probs(logits, targets, 0.9)
        values.sum().backward()
        assert logits.grad is not None
        results.append((values.detach(), logits.grad))
    for values, grad in results[1:]:
        assert torch.equal(values, results[0][0])
        assert torch.equal(grad, results[0][1])
