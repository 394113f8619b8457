"""Gradients: against fp64 autograd within stated bounds, twice for bits, over threads, and between providers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numerics_support import DTYPES, PRECISION, assert_same, attention_fp64, cpu, everyone, normal, threads, unequal
from torch import Tensor
from torch.nn import functional

from vime_core.numerics import AttentionSpec, Operations, load_provider, rope_table
from vime_core.numerics.arithmetic import exp, fma

IDS = torch.tensor([3, 0, 3, 3, 11, 0, 7, 3, 2])
CU = torch.tensor([0, 2, 2, 9])
TABLE = rope_table(32, 32, 10000.0)
SPEC = AttentionSpec(0.2, window=5, soft_cap=3.0)


def _rms_fp64(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def _rope_fp64(x: Tensor) -> Tensor:
    cos, sin = (t[:9, None] for t in TABLE.double().chunk(2, -1))
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def _attention_fp64(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([attention_fp64(q[a:b], k[a:b], v[a:b], SPEC)[0] for a, b in ((0, 2), (2, 9))])


def _log_probs_fp64(x: Tensor) -> Tensor:
    return (x / float(torch.tensor(0.7))).log_softmax(-1).gather(1, IDS[:, None]).squeeze(1)


@dataclass(frozen=True)
class Case:
    """An operation, the same in fp64, the shapes of its inputs, and how many fp32 roundings its gradient may take."""

    ours: Callable[..., Tensor]
    exact: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...]
    terms: int = 40


CASES: dict[str, Case] = {
    "linear": Case(lambda ops, x, w, b: ops.linear(x, w, b), functional.linear, ((9, 70), (13, 70), (13,))),
    "rms_norm": Case(lambda ops, x, w: ops.rms_norm(x, w, 1e-5), _rms_fp64, ((9, 70), (70,))),
    "swiglu": Case(lambda ops, x: ops.swiglu(x), lambda x: functional.silu(x[:, :35]) * x[:, 35:], ((9, 70),)),
    "rope": Case(lambda ops, x: ops.rope(x, torch.arange(9), TABLE), _rope_fp64, ((9, 3, 32),)),
    "soft_cap": Case(lambda ops, x: ops.soft_cap(x, 2.0), lambda x: 2 * torch.tanh(x / 2), ((9, 70),)),
    "embedding": Case(lambda ops, w: ops.embedding(IDS, w), lambda w: w[IDS], ((13, 20),)),
    "attention": Case(
        lambda ops, q, k, v: ops.attention_packed(q, k, v, CU, SPEC)[0],
        _attention_fp64,
        ((9, 4, 32), (9, 2, 32), (9, 2, 32)),
        terms=120,
    ),
    "token_log_probs": Case(lambda ops, x: ops.token_log_probs(x, IDS, 0.7), _log_probs_fp64, ((9, 70),)),
    "log_softmax": Case(
        lambda ops, x: ops.log_softmax(x, 0.7).gather(1, IDS[:, None]).squeeze(1), _log_probs_fp64, ((9, 70),)
    ),
}


def inputs_of(case: Case, dtype: torch.dtype, seed: int) -> list[Tensor]:
    return [normal(seed + i, *shape, dtype=dtype).requires_grad_() for i, shape in enumerate(case.shapes)]


def gradients(case: Case, ops: Operations, dtype: torch.dtype, seed: int) -> tuple[Tensor, ...]:
    inputs = inputs_of(case, dtype, seed)
    y = case.ours(ops, *inputs)
    return torch.autograd.grad(y, inputs, normal(seed + 9, *y.shape).to(y.dtype))


def exact_gradients(case: Case, dtype: torch.dtype, seed: int) -> tuple[Tensor, ...]:
    inputs = [t.detach().double().requires_grad_() for t in inputs_of(case, dtype, seed)]
    y = case.exact(*inputs)
    return torch.autograd.grad(
        y, inputs, normal(seed + 9, *y.shape).to(dtype if y.dim() > 1 else torch.float32).double()
    )


@pytest.mark.parametrize("provider", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_against_fp64(name: str, dtype: torch.dtype, provider: str) -> None:
    """One final rounding, and fp32 roundings of numbers as large as the largest gradient.

    Attention keeps o rounded, so in bf16 D = dot(dy, o) is known to 2^-8 of |dy| |o| only: twice that is allowed.
    """
    case = CASES[name]
    for seed in (0, 100):
        got, exact = gradients(case, load_provider(provider), dtype, seed), exact_gradients(case, dtype, seed)
        for g, e in zip(got, exact, strict=True):
            loose = 2 * PRECISION[dtype] if name == "attention" else 0.0
            bound = e.abs() * PRECISION[dtype] * 1.01 + e.abs().max() * (case.terms * 2.0**-24 + loose)
            assert ((g.double() - e).abs() / bound).max().item() <= 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_twice_and_over_threads(name: str, dtype: torch.dtype) -> None:
    first = gradients(CASES[name], cpu(), dtype, 0)
    assert_same(first, gradients(CASES[name], cpu(), dtype, 0))
    with threads(2):
        assert_same(first, gradients(CASES[name], cpu(), dtype, 0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", sorted(CASES.keys() - {"attention"}))
def test_all_providers_agree(name: str, dtype: torch.dtype) -> None:
    """Bit for bit; attention alone, whose reference backward is matrix products, is held to the bound above."""
    for operations in everyone().values():
        assert_same(gradients(CASES[name], cpu(), dtype, 0), gradients(CASES[name], operations, dtype, 0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_of_an_embedding_is_its_rows_one_after_another(dtype: torch.dtype) -> None:
    """In fp32, ascending, rounded once; subnormals are zeros, also where their sum would not be one."""
    ids, grad = torch.tensor([3, 1, 3, 0, 3, 1, 3, 5, 5, 5, 5, 5, 3]), normal(0, 13, 40, dtype=dtype)
    grad[ids == 5] = torch.tensor(8e-39).to(dtype)
    totals = np.zeros((7, 40), dtype=np.float32)
    for place, token in enumerate(ids.tolist()):
        row = grad[place].float().numpy()
        totals[token] += np.where(np.abs(row) < 2.0**-126, np.float32(0), row)
    for operations in everyone().values():
        found = operations.kernels.embedding_backward(grad, ids, 7)
        assert_same(found, torch.from_numpy(totals).to(dtype))
        backwards = operations.kernels.embedding_backward(grad.flip(0), ids.flip(0), 7)
        assert dtype == torch.bfloat16 or unequal(found, backwards) > 0


def test_the_gradient_of_a_value_runs_over_heads_then_queries() -> None:
    """Of queries that are zero: p is exp(-lse), and the sum of fused multiply-adds can be written out."""
    q, k, v, dy = torch.zeros(9, 3, 20), normal(1, 9, 1, 20), normal(2, 9, 1, 20), normal(3, 9, 3, 20)
    cu, spec = torch.tensor([0, 9]), AttentionSpec(0.3)
    o, lse = cpu().attention_packed(q, k, v, cu, spec)

    def first_value(steps: list[tuple[int, int]]) -> Tensor:
        total = torch.zeros(20)
        for head, query in steps:
            total = fma(exp(-lse[query, head]).expand(20), dy[query, head], total)
        return total

    steps = [(head, query) for head in range(3) for query in range(9)]
    for operations in everyone().values():
        if operations.provider == "cpu":
            dv = operations.kernels.attention_backward(dy, q, k, v, o, lse, cu, spec)[2]
            assert_same(dv[0, 0], first_value(steps))
    assert unequal(first_value(steps), first_value(sorted(steps, key=lambda step: step[1]))) > 0
    assert unequal(first_value(steps), first_value([(h, 8 - i) for h, i in steps])) > 0


@settings(max_examples=10)
@given(st.integers(100, 700), st.sampled_from(DTYPES))
def test_large_gradients_over_threads(m: int, dtype: torch.dtype) -> None:
    case = Case(
        lambda ops, x, w: ops.rms_norm(ops.linear(x, w), x.new_ones(50), 1e-5), functional.linear, ((m, 64), (50, 64))
    )
    one = gradients(case, cpu(), dtype, m)
    with threads(2):
        assert_same(one, gradients(case, cpu(), dtype, m))


def test_the_residual_stream_has_one_gradient() -> None:
    """r and y both flow on: the gradient of x and of the residual is dr + the norm's, rounded once."""
    x, residual, weight = (t.requires_grad_() for t in (normal(0, 5, 40), normal(1, 5, 40), normal(2, 40)))
    y, r = cpu().add_rms_norm(x, residual, weight, 1e-5)
    dy, dr = normal(3, 5, 40), normal(4, 5, 40)
    got = torch.autograd.grad((y, r), (x, residual, weight), (dy, dr))
    wide = [t.detach().double().requires_grad_() for t in (x, residual, weight)]
    total = wide[0] + wide[1]
    exact = torch.autograd.grad((_rms_fp64(total, wide[2]), total), wide, (dy.double(), dr.double()))
    assert_same(got[0], got[1])
    for g, e in zip(got, exact, strict=True):
        torch.testing.assert_close(g, e.float(), rtol=1e-5, atol=1e-5)
    only_stream = torch.autograd.grad(cpu().add_rms_norm(x, residual, weight, 1e-5)[1], (x, residual), dr)
    assert_same(only_stream, (dr, dr))


@pytest.mark.parametrize("shape", [(1024,), (2, 512)])
def test_gradients_of_a_linear_are_linears_over_the_chunks_of_what_they_sum(shape: tuple[int, ...]) -> None:
    linear, (n, k) = cpu().kernels.linear, (1024, 24)
    x, weight = normal(0, *shape, k).requires_grad_(), normal(1, n, k).requires_grad_()
    dy = normal(2, *shape, n)
    got = torch.autograd.grad(cpu().linear(x, weight), (x, weight), dy)
    rows, dy_rows = x.detach().view(-1, k), dy.view(-1, n)
    dx, dw = ((dy_rows, weight.detach().t()), (dy_rows.t(), rows.t()))
    assert_same(got, (linear(*dx, None, 2, False).view(x.shape), linear(*dw, None, 2, False)))
    assert unequal(got[0].view(-1, k), linear(*dx, None, 1, False)) > 0


def test_only_what_asks_for_a_gradient_gets_one() -> None:
    x, weight = normal(0, 5, 40), normal(1, 7, 40).requires_grad_()
    y = cpu().linear(x, weight)
    y.backward(torch.ones_like(y))
    assert x.grad is None
    assert weight.grad is not None
    with torch.no_grad():
        assert not cpu().linear(x, weight).requires_grad


def test_a_small_layer_backwards() -> None:
    """Every operation in one graph, against fp64."""
    shapes = {"x": (9, 64), "norm": (64,), "qkv": (128, 64), "out": (64, 64), "up": (96, 64), "down": (64, 48)}
    leaves = {name: normal(i, *shape, scale=0.3) for i, (name, shape) in enumerate(shapes.items())}

    def layer(p: dict[str, Tensor], ops: Operations) -> Tensor:
        q, k, v = ops.linear(ops.rms_norm(p["x"], p["norm"], 1e-5), p["qkv"]).split([64, 32, 32], -1)
        q, k, v = (t.unflatten(-1, (-1, 32)) for t in (q, k, v))
        positions = torch.tensor([0, 1, *range(7)])
        o, _ = ops.attention_packed(ops.rope(q, positions, TABLE), ops.rope(k, positions, TABLE), v, CU, SPEC)
        y, r = ops.add_rms_norm(ops.linear(o.flatten(-2), p["out"]), p["x"], p["norm"], 1e-5)
        return ops.token_log_probs(r + ops.linear(ops.swiglu(ops.linear(y, p["up"])), p["down"]), IDS)

    def exact(p: dict[str, Tensor]) -> Tensor:
        q, k, v = functional.linear(_rms_fp64(p["x"], p["norm"]), p["qkv"]).split([64, 32, 32], -1)
        cos, sin = (t[[0, 1, *range(7)], None] for t in TABLE.double().chunk(2, -1))
        heads = [t.unflatten(-1, (-1, 32)) for t in (q, k, v)]
        turned = [torch.cat([a * cos - b * sin, b * cos + a * sin], -1) for a, b in (t.chunk(2, -1) for t in heads[:2])]
        r = functional.linear(_attention_fp64(turned[0], turned[1], heads[2]).flatten(-2), p["out"]) + p["x"]
        gate, up = functional.linear(_rms_fp64(r, p["norm"]), p["up"]).chunk(2, -1)
        logits = r + functional.linear(functional.silu(gate) * up, p["down"])
        return logits.log_softmax(-1).gather(1, IDS[:, None]).squeeze(1)

    ours = {name: t.clone().requires_grad_() for name, t in leaves.items()}
    wide = {name: t.double().requires_grad_() for name, t in leaves.items()}
    result, expected = layer(ours, cpu()), exact(wide)
    torch.testing.assert_close(result.detach(), expected.detach().float(), rtol=1e-5, atol=1e-5)
    got = torch.autograd.grad(result.sum(), list(ours.values()))
    want = torch.autograd.grad(expected.sum(), list(wide.values()))
    for g, e in zip(got, want, strict=True):
        torch.testing.assert_close(g, e.float(), rtol=1e-4, atol=float(e.abs().max()) * 1e-5)


def test_control_a_wrong_gradient_is_out_of_bounds() -> None:
    case = CASES["swiglu"]
    got, exact = gradients(case, cpu(), torch.float32, 0)[0], exact_gradients(case, torch.float32, 0)[0]
    wrong = torch.where(got.abs() == got.abs().max(), got * (1 + 1e-5), got)
    bound = exact.abs() * PRECISION[torch.float32] * 1.01 + exact.abs().max() * case.terms * 2.0**-24
    assert ((wrong.double() - exact).abs() / bound).max().item() > 1
    assert unequal(wrong, got) == 1
