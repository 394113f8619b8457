"""Block FP8: scales, exact dots, partial blocks, zero blocks, rows; straight-through gradients."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from glm5_support import assert_same, check_gradients, check_rows, e4m3_by_hand, normal, unequal
from hypothesis import given
from hypothesis import strategies as st

from vime_glm5.numerics import GLM5_V1, Glm5Operations, load_operations
from vime_glm5.numerics.e4m3 import dequantise_weight, quantise_groups, quantise_weight


@given(st.floats(-448, 448, width=32))
def test_rounding_is_to_the_nearest_e4m3(value: float) -> None:
    x = torch.tensor([value])
    from vime_glm5.numerics.e4m3 import round_e4m3

    assert float(round_e4m3(x, torch.ones(1)).double()) == e4m3_by_hand(float(x))


def test_scales_are_amax_over_448_by_ieee_division() -> None:
    w = normal(0, 300, 200, scale=0.3)
    held = quantise_weight(w)
    assert held.scales.shape == (3, 2)
    for i in range(3):
        for j in range(2):
            block = w[128 * i : 128 * i + 128, 128 * j : 128 * j + 128].float()
            amax = block.abs().max()
            assert held.scales[i, j] == torch.tensor(float(amax)) / torch.tensor(448.0)
            assert held.q[128 * i : 128 * i + 128, 128 * j : 128 * j + 128].float().abs().max() == 448


def test_blocks_and_groups_of_zeros_stay_finite() -> None:
    held = quantise_weight(torch.zeros(130, 130, dtype=torch.bfloat16))
    assert (held.scales > 0).all()
    assert not dequantise_weight(held).any()
    q, scales = quantise_groups(torch.zeros(3, 200, dtype=torch.bfloat16))
    assert scales.isfinite().all()
    assert (scales > 0).all()
    assert not q.float().any()
    ops = load_operations(GLM5_V1, "cpu")
    assert not ops.block_linear(torch.zeros(3, 130, dtype=torch.bfloat16), normal(1, 5, 130)).any()


def test_tiny_activations_keep_their_scale() -> None:
    x = torch.full((1, 128), 2.0**-60, dtype=torch.bfloat16)
    q, scales = quantise_groups(x)
    assert scales[0, 0] == torch.tensor(2.0**-60) / torch.tensor(448.0)
    assert (q.float() == 448).all()


def _exact(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The definition with rational dot products."""
    q, sx = quantise_groups(x)
    held = quantise_weight(w)
    out = torch.zeros(len(x), len(w), dtype=x.dtype)
    for m in range(len(x)):
        for n in range(len(w)):
            total = torch.zeros(())
            for block in range(q.shape[1]):
                row = held.q[n, 128 * block : 128 * block + 128].double().tolist()
                pairs = zip(q[m, block].double().tolist(), row, strict=False)
                dot = sum((Fraction(a) * Fraction(b) for a, b in pairs), Fraction(0))
                exact = torch.tensor(float(dot), dtype=torch.float64).float()
                assert float(dot) == dot, "the dot product does not fit fp64"
                total = total + (exact * sx[m, block]) * held.scales[n // 128, block]
            out[m, n] = total.to(x.dtype)
    return out


def test_against_rational_arithmetic(every: Glm5Operations) -> None:
    x, w = normal(2, 4, 300), normal(3, 140, 300, scale=0.1)
    w[:10] *= 1e-3
    assert_same(every.block_linear(x, w)[:, ::9], _exact(x, w)[:, ::9])


def test_against_rational_arithmetic_can_fail() -> None:
    x, w = normal(2, 4, 300), normal(3, 140, 300, scale=0.1)
    assert unequal(torch.nn.functional.linear(x, w), _exact(x, w)) > 100


@pytest.mark.parametrize("k", [96, 128, 576, 700])
def test_rows_are_independent(every: Glm5Operations, k: int) -> None:
    w = normal(4, 70, k)
    check_rows(lambda x: every.block_linear(x, w), normal(5, 37, k))


def test_what_was_quantised_before_gives_the_same_bits(every: Glm5Operations) -> None:
    x, w = normal(6, 9, 200), normal(7, 150, 200)
    assert_same(every.block_linear(x, every.quantise_weight(w)), every.block_linear(x, w))
    halves = [every.block_linear(x, part) for part in (w[:128], w[128:])]
    assert_same(torch.cat(halves, -1), every.block_linear(x, w))


def test_gradients_go_straight_through(ops: Glm5Operations) -> None:
    x, w = normal(8, 11, 200), normal(9, 60, 200)
    linear = torch.nn.functional.linear
    check_gradients(ops.block_linear, linear, [x, w], 6e-3)
    check_gradients(ops.block_linear, linear, [x.float(), w.float()], 1e-5)


def test_absorbed_weights_are_the_quantised_ones(every: Glm5Operations) -> None:
    heads, nope, v, latent = 3, 40, 30, 256
    w = normal(10, heads * (nope + v), latent)
    found = every.absorbed_weights(w, heads, nope)
    whole = dequantise_weight(quantise_weight(w)).bfloat16().view(heads, nope + v, latent)
    assert_same(found.keys, whole[:, :nope].mT.contiguous())
    assert_same(found.values, whole[:, nope:].contiguous())
    check_rows(lambda x: every.head_linear(x, found.keys), normal(11, 12, heads, nope))


def test_absorbed_gradients(ops: Glm5Operations) -> None:
    heads, nope, v, latent = 2, 24, 16, 128
    x, w = normal(12, 7, heads, nope, dtype=torch.float32), normal(13, heads * (nope + v), latent, dtype=torch.float32)

    def ours(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        held = ops.absorbed_weights(w, heads, nope)
        return ops.head_linear(ops.head_linear(x, held.keys), held.values)

    quantised = dequantise_weight(quantise_weight(w)).double()

    def exact(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        w = (w + (quantised - w).detach()).view(heads, nope + v, latent)
        latents = torch.einsum("thn,hnl->thl", x, w[:, :nope])
        return torch.einsum("thl,hvl->thv", latents, w[:, nope:])

    check_gradients(ours, exact, [x, w], 1e-5)


def test_stacked_projections_are_quantised_apart(every: Glm5Operations) -> None:
    x, gate, up = normal(14, 6, 200), normal(15, 96, 200), normal(16, 96, 200, scale=30.0)
    together = torch.cat([gate, up])
    apart = torch.cat([every.block_linear(x, gate), every.block_linear(x, up)], -1)
    assert_same(every.block_linear(x, together, 2), apart)
    assert_same(every.block_linear(x, every.quantise_weight(together, 2)), apart)
    assert_same(dequantise_weight(quantise_weight(together, 2))[:96], dequantise_weight(quantise_weight(gate)))
    assert unequal(every.block_linear(x, together), apart) > 100
