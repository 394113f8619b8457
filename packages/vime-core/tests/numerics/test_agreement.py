"""The C++ builds of every instruction set and the reference are the same function, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numerics_support import DTYPES, Pages, assert_same, cpu, everyone, next_up, normal, unequal
from torch import Tensor

from vime_core.numerics import AttentionSpec, Operations, rope_table
from vime_core.numerics.cpu import build
from vime_core.numerics.draw import numbers

dtypes = st.sampled_from(DTYPES)
seeds = st.integers(0, 2**20)


def agree(run: Callable[[Operations], Tensor | tuple[Tensor, ...]]) -> None:
    expected = run(everyone()["reference"])
    for operations in everyone().values():
        assert_same(expected, run(operations))


def test_this_machine_compares_more_than_one_build() -> None:
    if "avx512f" in build.machine_features():
        assert {"avx2", "avx512"} <= everyone().keys()


@settings(max_examples=40)
@given(st.integers(1, 20), st.integers(1, 40), st.integers(1, 150), dtypes, st.booleans(), seeds)
@example(7, 9, 1024, torch.bfloat16, True, 0)
@example(4, 9, 2048, torch.float32, False, 1)
@example(1, 8, 31, torch.bfloat16, False, 2)
def test_linear(m: int, n: int, k: int, dtype: torch.dtype, with_bias: bool, seed: int) -> None:
    x, weight = normal(seed, m, k, dtype=dtype), normal(seed + 1, n, k, dtype=dtype)
    bias = normal(seed + 2, n, dtype=dtype) if with_bias else None
    agree(lambda ops: ops.linear(x, weight, bias))
    agree(lambda ops: ops.kernels.linear(x, weight, bias, ops.chunk_count(n, k), True))
    agree(lambda ops: ops.kernels.column_sum(x))


def _by_columns(x: Tensor) -> Tensor:
    return x.t().contiguous().t()


@settings(max_examples=25)
@given(st.integers(1, 140), st.integers(1, 110), st.integers(1, 100), dtypes, st.booleans(), seeds)
@example(96, 48, 64, torch.bfloat16, False, 0)  # whole tiles, strips and blocks
@example(97, 49, 65, torch.bfloat16, True, 1)  # one row, column and element more
@example(103, 17, 31, torch.float32, True, 2)
@example(8, 97, 1024, torch.bfloat16, True, 3)  # two chunks; x is the smaller operand, then w
@example(97, 8, 2048, torch.bfloat16, False, 4)  # four chunks: of two sums the order is not seen
@example(13, 50, 1100, torch.bfloat16, True, 5)  # a chunk so long that lanes go one by one
@example(50, 13, 1090, torch.float32, False, 6)
def test_packed_products(m: int, n: int, k: int, dtype: torch.dtype, with_bias: bool, seed: int) -> None:
    """Many rows, and operands that lie by columns as those of gradients do: each packs in a way of its own."""
    x, weight = normal(seed, m, k, dtype=dtype), normal(seed + 1, n, k, dtype=dtype)
    bias = normal(seed + 2, n, dtype=dtype) if with_bias else None
    reference = everyone()["reference"]
    chunks = reference.chunk_count(n, k)
    for wide in (False, True):
        expected = reference.kernels.linear(x, weight, bias, chunks, wide)
        for operations in everyone().values():
            for a in (x, _by_columns(x)):
                for b in (weight, _by_columns(weight)):
                    assert_same(expected, operations.kernels.linear(a, b, bias, chunks, wide))


@given(st.integers(1, 9), st.integers(1, 90), dtypes, st.sampled_from([1e-5, 1e-6]), seeds)
def test_norms(m: int, h: int, dtype: torch.dtype, eps: float, seed: int) -> None:
    x, residual, dy, dr = (normal(seed + i, m, h, dtype=dtype) for i in range(4))
    weight = normal(seed + 5, h, dtype=dtype)
    agree(lambda ops: ops.rms_norm(x, weight, eps))
    agree(lambda ops: ops.add_rms_norm(x, residual, weight, eps))
    agree(lambda ops: ops.kernels.add_rms_norm_backward(dy, dr, x, weight, eps))
    agree(lambda ops: ops.kernels.add_rms_norm_backward(dy, None, x, weight, eps))


@given(st.integers(1, 9), st.sampled_from([2, 32, 34, 64, 128]), dtypes, st.booleans(), st.booleans(), seeds)
def test_rope(t: int, rotary: int, dtype: torch.dtype, interleaved: bool, inverse: bool, seed: int) -> None:
    table = rope_table(64, rotary, 10000.0)
    x = normal(seed, t, 5, rotary + 6, dtype=dtype)[:, 1:4]  # rows with a stride, a part of the head at rest
    positions = torch.randint(0, 64, (t,), generator=torch.Generator().manual_seed(seed))
    agree(lambda ops: ops.kernels.rope(x, positions, table, interleaved, inverse))


@given(st.integers(1, 9), st.integers(1, 80), dtypes, st.floats(0.1, 60), seeds)
def test_swiglu(m: int, f: int, dtype: torch.dtype, scale: float, seed: int) -> None:
    gate_up, dh = normal(seed, m, 2 * f, dtype=dtype, scale=scale), normal(seed + 1, m, f, dtype=dtype)
    agree(lambda ops: ops.swiglu(gate_up))
    agree(lambda ops: ops.kernels.swiglu_backward(dh, gate_up))


@given(st.integers(1, 5), st.integers(1, 300), dtypes, st.floats(0.1, 20), seeds)
def test_log_probs(m: int, v: int, dtype: torch.dtype, scale: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits, temperature = normal(seed, m, v, dtype=dtype, scale=scale), torch.rand(m, generator=generator) + 0.2
    ids = torch.randint(0, v, (m,), generator=generator)
    agree(lambda ops: ops.log_softmax(logits, temperature))
    agree(lambda ops: ops.token_log_probs(logits, ids, temperature))
    agree(lambda ops: ops.kernels.token_log_probs_backward(temperature, logits, ids, temperature))


@given(st.integers(1, 300), st.integers(0, 40), st.floats(0, 1.1), dtypes, st.booleans(), seeds)
def test_masks(v: int, top_k: int, top_p: float, dtype: torch.dtype, ties: bool, seed: int) -> None:
    logits = normal(seed, 3, v, dtype=dtype, scale=3)
    logits = logits.round() if ties else logits
    agree(lambda ops: ops.keep_mask(logits, 0.7, top_k, top_p))


@given(st.integers(1, 4), st.integers(1, 300), st.floats(0, 3), dtypes, st.booleans(), seeds)
def test_draws(m: int, v: int, temperature: float, dtype: torch.dtype, ties: bool, seed: int) -> None:
    logits = normal(seed, m, v, dtype=dtype, scale=3)
    logits = logits.round() if ties else logits
    u = numbers(seed, m, torch.device("cpu"))
    agree(lambda ops: ops.draw(logits, u, temperature if temperature > 0.05 else 0.0))


SPECS = [(None, None), (5, None), (None, 12.0), (3, 2.0)]


@settings(max_examples=25)
@given(
    st.sampled_from([(4, 2), (3, 1), (2, 2), (7, 1)]),
    st.sampled_from([20, 32, 64, 128]),
    st.sampled_from(SPECS),
    dtypes,
    seeds,
)
def test_attention(
    heads: tuple[int, int], dim: int, spec: tuple[int | None, float | None], dtype: torch.dtype, seed: int
) -> None:
    lengths, attention = [1, 9, 20], AttentionSpec(dim**-0.5, *spec)
    q, k, v = (normal(seed + i, 30, heads[min(i, 1)], dim, dtype=dtype) for i in range(3))
    cu = torch.tensor([0, 1, 10, 30])
    agree(lambda ops: ops.attention_packed(q, k, v, cu, attention))
    parts = [(i, 0, n) for i, n in enumerate(lengths)]

    def paged(ops: Operations) -> Tensor:
        pages = Pages(list(k.split(lengths)), list(v.split(lengths)), 4, seed)
        return torch.cat(pages.run(ops, list(q.split(lengths)), parts, attention))

    agree(paged)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_over_many_blocks_of_lanes(dtype: torch.dtype) -> None:
    """Four blocks of 16 keys, since of two the order is not seen."""
    q, k, v = (normal(i, 60, heads, 32, dtype=dtype) for i, heads in enumerate((2, 1, 1)))
    agree(lambda ops: ops.attention_packed(q, k, v, torch.tensor([0, 60]), AttentionSpec(0.3)))


def test_instruction_sets_agree_in_the_gradient_of_attention() -> None:
    q, k, v, dy = (normal(i, 40, n, 32, dtype=torch.bfloat16) for i, n in enumerate((6, 2, 2, 6)))
    cu, spec = torch.tensor([0, 13, 40]), AttentionSpec(0.2, 9, 5.0)
    results = []
    for operations in everyone().values():
        if operations.provider == "cpu":
            o, lse = operations.attention_packed(q, k, v, cu, spec)
            results.append(operations.kernels.attention_backward(dy, q, k, v, o, lse, cu, spec))
    for result in results:
        assert_same(results[0], result)


def _around(*values: float) -> Tensor:
    exact = torch.tensor(values)
    return torch.cat([exact, *(torch.nextafter(exact, exact.new_full((), to)) for to in (-torch.inf, torch.inf))])


def test_where_scalar_functions_change_their_formula() -> None:
    """exp is 0 below -87 and infinite above 88; tanh is a polynomial below 0.625."""
    x = _around(-87.0, 87.0, -88.0, 88.0)
    agree(lambda ops: ops.swiglu(torch.stack([x, torch.ones_like(x)], -1)))
    lower = torch.stack([torch.zeros(3), _around(-87.0)], -1)
    ids, ones = torch.zeros(3, dtype=torch.int64), torch.ones(3)
    agree(lambda ops: ops.kernels.token_log_probs_backward(ones, lower, ids, ones))
    q = _around(0.625, -0.625).view(-1, 1, 1)  # of sequences of one token the log-sum-exp is the capped score
    cu, spec = torch.arange(len(q) + 1), AttentionSpec(1.0, soft_cap=1.0)
    agree(lambda ops: ops.attention_packed(q, torch.ones_like(q), q, cu, spec)[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_numbers(dtype: torch.dtype) -> None:
    """Subnormals, zeros of both signs, the largest finite numbers that don't overflow in sums."""
    special = torch.tensor([0.0, -0.0, 1e-39, -1e-40, 1.2e-38, -1.2e-38, 1e-20, 1e18, -1e18, 1.0]).to(dtype)
    picks = torch.randint(0, len(special), (6, 40), generator=torch.Generator().manual_seed(0))
    x, weight = special[picks], special[picks.flip(1)] * 0.5
    agree(lambda ops: ops.linear(x, weight))
    agree(lambda ops: ops.swiglu(x))
    agree(lambda ops: ops.kernels.column_sum(x))
    agree(lambda ops: ops.log_softmax(x.clamp(-80, 80)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_beyond_the_largest_number_are_infinite(dtype: torch.dtype) -> None:
    """Infinite before the rounding, or by it: the largest fp32 is nearer to the infinity of bf16."""
    largest = torch.tensor(torch.finfo(dtype).max).to(dtype)
    gate_up = torch.stack([torch.full((20,), 40.0, dtype=dtype), -largest.expand(20)], -1)
    x, weight = torch.full((3, 40), 1e30, dtype=dtype), torch.full((9, 40), 1e30, dtype=dtype)
    assert bool(cpu().linear(x, weight).isposinf().all())
    assert bool(cpu().swiglu(gate_up).isneginf().all())
    agree(lambda ops: (ops.linear(x, weight), ops.swiglu(gate_up)))
    beside = torch.tensor([[largest.item()]], dtype=dtype)
    agree(lambda ops: ops.linear(beside, torch.tensor([[1.00390625]]).to(dtype)))


def test_the_callers_denormal_mode_changes_nothing() -> None:
    x, weight = normal(0, 5, 33, scale=1e-19), normal(1, 9, 33, scale=1e-19)
    before = cpu().linear(x, weight)
    try:
        torch.set_flush_denormal(True)
        flushed = cpu().linear(x, weight)
    finally:
        torch.set_flush_denormal(False)
    assert_same(before, flushed)


def test_control_one_ulp_is_seen() -> None:
    x, weight = normal(0, 5, 64), normal(1, 9, 64)
    changed = x.clone()
    changed[2, 10] = next_up(x)[2, 10]
    a, b = cpu().linear(x, weight), cpu().linear(changed, weight)
    assert unequal(a[2], b[2]) > 0
    assert unequal(a[[0, 1, 3, 4]], b[[0, 1, 3, 4]]) == 0
