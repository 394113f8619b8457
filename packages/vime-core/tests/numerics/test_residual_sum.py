"""The residual sum without its norm: the r of `add_rms_norm` and its gradient, whoever adds."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from numerics_support import DTYPES, assert_same, everyone, normal, unequal
from torch import Tensor

from vime_core.numerics import Operations


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x, residual = normal(0, 7, 70, dtype=dtype, scale=3.0), normal(1, 7, 70, dtype=dtype)
    return x.requires_grad_(), residual.requires_grad_()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("as_torch", [False, True])
@pytest.mark.parametrize("name", everyone())
def test_bits_are_those_of_the_norms_stream(name: str, as_torch: bool, dtype: torch.dtype) -> None:
    own = everyone()[name]
    ops = replace(own, kernels=replace(own.kernels, adds_as_torch=as_torch))
    x, residual = inputs(dtype)
    weight, dy = normal(2, 70, dtype=dtype), normal(3, 7, 70, dtype=dtype)
    output, want = ops.residual_sum(x, residual), own.add_rms_norm(x, residual, weight, 1e-5)[1]
    assert_same(output, want)
    assert_same(torch.autograd.grad(output, (x, residual), dy), torch.autograd.grad(want, (x, residual), dy))


class DoubledStream(Operations):
    """A contract's own operations, which add the residual stream otherwise."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return super().add_rms_norm(x, residual + residual, weight, eps)


@pytest.mark.parametrize("as_torch", [False, True])
@pytest.mark.parametrize("name", everyone())
def test_a_sum_that_a_contract_defines_anew_is_the_one_that_is_taken(name: str, as_torch: bool) -> None:
    own = replace(everyone()[name], kernels=replace(everyone()[name].kernels, adds_as_torch=as_torch))
    ops = DoubledStream(**{field.name: getattr(own, field.name) for field in fields(own)})
    x, residual = inputs(torch.float32)
    assert_same(ops.residual_sum(x, residual), own.residual_sum(x, residual + residual))
    assert unequal(ops.residual_sum(x, residual), own.residual_sum(x, residual)) > 0


def test_providers_that_count_subnormals_as_zero_do_not_add_as_torch() -> None:
    tiny = torch.full((1, 16), 2.0**-127)
    for name, ops in everyone().items():
        assert not ops.kernels.adds_as_torch, name
        assert_same(ops.residual_sum(tiny, torch.zeros(1, 16)), torch.zeros(1, 16))
    assert unequal(tiny + torch.zeros(1, 16), torch.zeros(1, 16)) == 16
