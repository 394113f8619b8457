from __future__ import annotations

import torch

from vime_megatron.embedding import lookup


def gradients(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ours, torch's and the fp64 sum, where three tokens fill 2000 places."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(20, 8, generator=generator).to(dtype).requires_grad_()
    tokens = torch.randint(0, 3, (2000,), generator=generator)
    upstream = (torch.randn(2000, 8, generator=generator) + 0.3).to(dtype)
    (ours,) = torch.autograd.grad(lookup(weight, tokens), weight, upstream)
    (torchs,) = torch.autograd.grad(weight[tokens], weight, upstream)
    exact = torch.zeros(20, 8, dtype=torch.float64).index_add_(0, tokens, upstream.double())
    return ours, torchs, exact


def test_lookup_is_a_gather() -> None:
    weight = torch.randn(5, 3)
    assert torch.equal(lookup(weight, torch.tensor([4, 0, 4])), weight[[4, 0, 4]])


def test_gradients_are_rounded_once() -> None:
    ours, torchs, exact = gradients(torch.bfloat16)
    assert torch.allclose(ours.double(), exact, rtol=2**-8, atol=1e-3)
    assert not torch.allclose(torchs.double(), exact, rtol=2**-8, atol=1e-3)  # the reason for this module


def test_gradients_in_fp32() -> None:
    ours, _, exact = gradients(torch.float32)
    assert torch.allclose(ours.double(), exact, rtol=1e-5)
    assert torch.equal(ours[3:], torch.zeros(17, 8))
