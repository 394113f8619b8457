"""Row invariance: a row's bits depend on that row, whatever the batch, its order, its neighbours, the threads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numerics_support import DTYPES, assert_same, cpu, everyone, normal, row_violations, threads
from torch import Tensor

from vime_core.numerics import Operations, load_provider, rope_table

rows = st.integers(1, 300)
dtypes = st.sampled_from(DTYPES)
seeds = st.integers(0, 2**20)
TABLE = rope_table(32, 32, 10000.0)

RowOperation = Callable[[Operations, Tensor], Tensor]


def _rope(ops: Operations, x: Tensor) -> Tensor:
    heads = x[:, :64].reshape(-1, 2, 32)
    return ops.rope(heads, torch.full((len(x),), 7), TABLE, interleaved=True)


def _add_norm(ops: Operations, x: Tensor) -> Tensor:
    return torch.cat(ops.add_rms_norm(x, x * 0.5, x.new_ones(x.shape[1]), 1e-6), -1)


ROW_OPERATIONS: dict[str, RowOperation] = {
    "rms_norm": lambda ops, x: ops.rms_norm(x, x.new_ones(x.shape[1]), 1e-6),
    "add_rms_norm": _add_norm,
    "rope": _rope,
    "swiglu": lambda ops, x: ops.swiglu(x),
    "log_softmax": lambda ops, x: ops.log_softmax(x, 0.7),
    "token_log_probs": lambda ops, x: ops.token_log_probs(x, torch.full((len(x),), 3), 1.3),
    "keep_mask": lambda ops, x: ops.keep_mask(x, 0.7, 20, 0.9),
    "draw": lambda ops, x: ops.draw(x, torch.full((len(x),), 6 << 60), 1.3),
    "soft_cap": lambda ops, x: ops.soft_cap(x, 2.0),
}


@settings(max_examples=30)
@given(rows, st.integers(1, 70), st.integers(1, 200) | st.sampled_from([1024, 1536, 4096]), dtypes, seeds)
@example(1, 17, 96, torch.bfloat16, 0)
@example(3, 8, 64, torch.bfloat16, 1)
@example(4, 24, 1024, torch.bfloat16, 2)
@example(70, 9, 1024, torch.float32, 3)
@example(257, 9, 4096, torch.bfloat16, 5)
@example(300, 33, 513, torch.bfloat16, 4)
def test_linear(m: int, n: int, k: int, dtype: torch.dtype, seed: int) -> None:
    x, weight, bias = (
        normal(seed, m, k, dtype=dtype),
        normal(seed + 1, n, k, dtype=dtype),
        normal(seed + 2, n, dtype=dtype),
    )
    assert row_violations(lambda part: cpu().linear(part, weight, bias), x) == []


@pytest.mark.parametrize("k", [576, 1024, 1100])  # one chunk, two chunks, one long chunk
@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 6, 23, 24, 25, 95, 96, 97, 103, 104, 127, 128, 129, 226, 455])
def test_linear_around_its_tiles(m: int, k: int) -> None:
    """Three rows a tile below 96 rows; from there on packed strips of eight, 64 rows a piece."""
    x, weight = normal(0, 455, k, dtype=torch.bfloat16), normal(1, 20, k, dtype=torch.bfloat16)
    chunks = cpu().chunk_count(20, k)  # fp32 results: rounding to bf16 would hide most differences
    whole, part = (cpu().kernels.linear(rows, weight, None, chunks, True) for rows in (x, x[:m]))
    assert_same(whole[:m], part)


@pytest.mark.parametrize("name", ROW_OPERATIONS)
def test_row_operations(name: str) -> None:
    @settings(max_examples=12)
    @given(rows, st.sampled_from([64, 66, 96, 130]), dtypes, seeds)
    def check(m: int, width: int, dtype: torch.dtype, seed: int) -> None:
        x = normal(seed, m, width, dtype=dtype, scale=2)
        assert row_violations(lambda part: ROW_OPERATIONS[name](cpu(), part), x) == []

    check()


def test_the_reference_is_row_invariant_too() -> None:
    reference = load_provider("reference")
    x, weight = normal(0, 37, 130, dtype=torch.bfloat16), normal(1, 11, 130, dtype=torch.bfloat16)
    assert row_violations(lambda part: reference.linear(part, weight), x) == []
    for operation in ROW_OPERATIONS.values():
        assert row_violations(lambda part, run=operation: run(reference, part), x) == []


@pytest.mark.parametrize("provider", ["cpu", "reference"])
@pytest.mark.parametrize("name", [*ROW_OPERATIONS, "linear"])
def test_what_the_padding_of_a_step_holds_reaches_no_token(name: str, provider: str) -> None:
    """Rows that no request asks hold what was in memory; the cases of the provider ``cuda`` do the same."""
    ops, x = load_provider(provider), normal(0, 37, 130, dtype=torch.bfloat16)
    weight, tokens = normal(1, 11, 130, dtype=torch.bfloat16), torch.arange(37) % 3 > 0
    run = ROW_OPERATIONS.get(name, lambda ops, rows: ops.linear(rows, weight))
    whole = run(ops, x)
    for padding in (torch.nan, torch.inf, 0.0):
        changed = run(ops, torch.where(tokens[:, None], x, padding))
        assert_same(changed[tokens], whole[tokens])


@settings(max_examples=15)
@given(rows, st.integers(1, 300), st.integers(1, 300), dtypes, seeds)
def test_threads_change_nothing(m: int, n: int, k: int, dtype: torch.dtype, seed: int) -> None:
    x, weight = normal(seed, m, k, dtype=dtype), normal(seed + 1, n, k, dtype=dtype)
    for operations in everyone().values():
        if operations.provider == "cpu":
            one = operations.linear(x, weight), operations.kernels.column_sum(x), operations.log_softmax(x)
            with threads(2):
                two = operations.linear(x, weight), operations.kernels.column_sum(x), operations.log_softmax(x)
            assert_same(one, two)


@settings(max_examples=15)
@given(st.integers(1, 20), st.sampled_from([1024, 2048, 4096]), dtypes, seeds)
def test_chunks_side_by_side_are_the_one_block_walk(m: int, k: int, dtype: torch.dtype, seed: int) -> None:
    """What tensor-parallel ranks do: each sums its own whole chunks, all add them in ascending order."""
    ops = cpu()
    x, weight, bias = (
        normal(seed, m, k, dtype=dtype),
        normal(seed + 1, 11, k, dtype=dtype),
        normal(seed + 2, 11, dtype=dtype),
    )
    chunks = ops.chunk_count(11, k)
    assert chunks > 1
    shards = [
        ops.linear_partials(x_part, weight_part, chunks // 2)
        for x_part, weight_part in zip(x.chunk(2, -1), weight.chunk(2, -1), strict=True)
    ]
    assert_same(ops.linear(x, weight, bias), ops.sum_partials(torch.cat(shards), bias, dtype))


def test_columns_may_be_sharded_anywhere() -> None:
    x, weight = normal(0, 9, 1024, dtype=torch.bfloat16), normal(1, 37, 1024, dtype=torch.bfloat16)
    whole = cpu().linear(x, weight)
    assert_same(whole, torch.cat([cpu().linear(x, part) for part in weight.split(5)], -1))


def test_views_are_their_copies() -> None:
    x, weight = normal(0, 9, 200, dtype=torch.bfloat16)[:, 3:99], normal(1, 40, 96, dtype=torch.bfloat16)[::2]
    assert_same(cpu().linear(x.clone(), weight.clone()), cpu().linear(x, weight))


def test_leading_dimensions_are_rows() -> None:
    x, weight = normal(0, 2, 3, 40), normal(1, 7, 40)
    assert_same(cpu().linear(x, weight).reshape(6, 7), cpu().linear(x.reshape(6, 40), weight))
    assert cpu().linear(x[:0], weight).shape == (0, 3, 7)


def test_control_a_batch_dependent_operation_is_caught() -> None:
    """A linear that splits K when there are many rows, as libraries do."""
    weight = normal(1, 16, 512)

    def splits(x: Tensor) -> Tensor:
        if len(x) < 8:
            return cpu().linear(x, weight)
        return cpu().linear(x[:, :256], weight[:, :256]) + cpu().linear(x[:, 256:], weight[:, 256:])

    assert row_violations(splits, normal(0, 20, 512))


def test_control_nan_is_a_difference() -> None:
    x = normal(0, 6, 64)
    x[3, 5] = torch.nan
    assert row_violations(lambda part: cpu().rms_norm(part, torch.ones(64), 1e-6), x) == [3]
