"""What an optimizer took of the gradients that a step showed: planted moments, and clipping as torch does it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from vime_core.verify.taken import clip_factor, taken_gradients

BETA = 0.9
SHOWN = {"a": torch.tensor([3.0, -4.0]), "b": torch.tensor([0.5])}
BEFORE = {"a": torch.tensor([1.0, 2.0]), "b": torch.zeros(1)}


def stepped(gradients: dict[str, Tensor], factor: float = 1.0) -> dict[str, Tensor]:
    return {name: BETA * BEFORE[name] + (1 - BETA) * factor * gradient for name, gradient in gradients.items()}


def wrong(shown: dict[str, Tensor], after: dict[str, Tensor], factor: float = 1.0) -> list[str]:
    return [one.name for one in taken_gradients(shown, BEFORE, after, BETA, factor) if not one.right]


def test_the_shown_gradients_clipped_are_right() -> None:
    assert wrong(SHOWN, stepped(SHOWN, 0.25), 0.25) == []
    assert wrong(SHOWN, stepped(SHOWN, 0.25), 0.26) == ["a", "b"]


def test_every_name_is_judged_that_either_side_has() -> None:
    after = stepped(SHOWN)
    assert wrong(SHOWN, {"a": after["a"]}) == ["b"]
    assert wrong({"a": SHOWN["a"]}, after) == ["b"]


def test_a_gradient_of_zero_must_be_taken_as_zero() -> None:
    zero = SHOWN | {"b": torch.zeros(1)}
    assert wrong(zero, stepped(zero)) == []
    assert wrong(zero, stepped(SHOWN)) == ["b"]


def test_a_moment_that_is_no_number_is_wrong() -> None:
    assert wrong(SHOWN, stepped(SHOWN) | {"a": torch.tensor([math.nan, 0.0])}) == ["a"]


@pytest.mark.parametrize("scale", [1.0, 0.1, 1e-6])
@pytest.mark.parametrize("clip", [1.0, 1e-6])
def test_the_factor_is_that_of_torch(scale: float, clip: float) -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    gradient = torch.tensor([0.6, -0.8], dtype=torch.float64) * scale
    parameter.grad = gradient.clone()
    norm = torch.nn.utils.clip_grad_norm_([parameter], clip)
    assert torch.allclose(parameter.grad, gradient * clip_factor(float(norm), clip), rtol=1e-12)
    assert clip_factor(float(norm), 0.0) == 1.0
