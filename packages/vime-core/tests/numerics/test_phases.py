"""Phase invariance: prefill, chunks, cached prefixes, decode and the packed entry give one result, page by page."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numerics_support import DTYPES, Pages, assert_same, cpu, normal, threads, unequal
from torch import Tensor

from vime_core.numerics import AttentionSpec, PagedBatch, load_provider

HEADS, KV_HEADS = 6, 2
LENGTHS = [1, 7, 33, 70]
Sequences = tuple[list[Tensor], list[Tensor], list[Tensor]]


def sequences(dtype: torch.dtype, dim: int, seed: int = 0) -> Sequences:
    return tuple(  # pyright: ignore[reportReturnType]
        [normal(seed + 10 * i + j, n, heads, dim, dtype=dtype) for i, n in enumerate(LENGTHS)]
        for j, heads in enumerate((HEADS, KV_HEADS, KV_HEADS))
    )


def alone(inputs: Sequences, spec: AttentionSpec) -> list[Tensor]:
    """Every sequence by itself through the packed entry: what all else is compared with."""
    return [
        cpu().attention_packed(q, k, v, torch.tensor([0, len(q)]), spec)[0] for q, k, v in zip(*inputs, strict=True)
    ]


specs = st.builds(AttentionSpec, st.just(0.125), st.sampled_from([None, 4, 16]), st.sampled_from([None, 3.0]))


@settings(max_examples=30)
@given(
    page=st.sampled_from([1, 4, 16, 24, 128]),
    dim=st.sampled_from([32, 64, 128]),
    dtype=st.sampled_from(DTYPES),
    spec=specs,
    layout=st.sampled_from(["split", "interleaved"]),
    data=st.data(),
)
def test_any_schedule_gives_the_whole_sequence(
    page: int, dim: int, dtype: torch.dtype, spec: AttentionSpec, layout: str, data: st.DataObject
) -> None:
    """Chunks of any size, requests joining in any order, single tokens: all rows equal the sequence alone."""
    inputs = sequences(dtype, dim)
    expected = alone(inputs, spec)
    pages = Pages(inputs[1], inputs[2], page, seed=page, layout=layout)
    done = [0] * len(LENGTHS)
    while any(d < n for d, n in zip(done, LENGTHS, strict=True)):
        waiting = [i for i, n in enumerate(LENGTHS) if done[i] < n]
        batch = data.draw(st.permutations(waiting))[: data.draw(st.integers(1, len(waiting)))]
        parts = [(i, done[i], min(LENGTHS[i], done[i] + data.draw(st.sampled_from([1, 2, 15, 16, 40])))) for i in batch]
        for (i, first, end), o in zip(parts, pages.run(cpu(), inputs[0], parts, spec), strict=True):
            assert_same(expected[i][first:end], o)
            done[i] = end


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_neighbours_and_order_change_nothing(dtype: torch.dtype) -> None:
    inputs, spec = sequences(dtype, 64), AttentionSpec(0.125)
    expected = alone(inputs, spec)
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 2, 3]):
        packed = [torch.cat([t[i] for i in order]) for t in inputs]
        cu = torch.tensor([0, *(LENGTHS[i] for i in order)]).cumsum(0)
        o, _ = cpu().attention_packed(packed[0], packed[1], packed[2], cu, spec)
        assert_same(torch.cat([expected[i] for i in order]), o)


def test_a_prefix_in_the_cache_is_a_prefix_computed() -> None:
    """Two requests share the pages of a prefix that only the first one wrote."""
    (q, k, v), spec = sequences(torch.bfloat16, 64), AttentionSpec(0.125)
    q, k, v = ([t[3], torch.cat([t[3][:32], t[2][:20]])] for t in (q, k, v))
    expected = alone((q, k, v), spec)
    pages = Pages(k, v, 16, seed=0)
    assert_same(expected[0], pages.run(cpu(), q, [(0, 0, 70)], spec)[0])
    pages.table[1, :2] = pages.table[0, :2]
    assert_same(expected[1][32:], pages.run(cpu(), q, [(1, 32, 52)], spec)[0])


def test_threads_change_nothing() -> None:
    inputs, spec = sequences(torch.bfloat16, 64), AttentionSpec(0.125)
    cu = torch.tensor([0, *LENGTHS]).cumsum(0)
    packed = [torch.cat(t) for t in inputs]
    one = cpu().attention_packed(packed[0], packed[1], packed[2], cu, spec)
    with threads(2):
        assert_same(one, cpu().attention_packed(packed[0], packed[1], packed[2], cu, spec))


def test_queries_with_a_row_stride_are_their_copies() -> None:
    """q, k and v as slices of one projection."""
    joint = normal(0, 20, (HEADS + 2 * KV_HEADS) * 32, dtype=torch.bfloat16)
    parts = [t.unflatten(-1, (-1, 32)) for t in joint.split([HEADS * 32, KV_HEADS * 32, KV_HEADS * 32], -1)]
    cu, spec = torch.tensor([0, 20]), AttentionSpec(0.2)
    assert_same(
        cpu().attention_packed(parts[0], parts[1], parts[2], cu, spec),
        cpu().attention_packed(*(t.contiguous() for t in parts), cu, spec),  # pyright: ignore[reportArgumentType]
    )


@pytest.mark.parametrize("window", [None, 10])
def test_control_foreign_pages_are_never_read_and_owned_ones_always(window: int | None) -> None:
    inputs, spec = sequences(torch.bfloat16, 64), AttentionSpec(0.125, window)
    pages = Pages(inputs[1], inputs[2], 4, seed=1)
    parts = [(i, 0, n) for i, n in enumerate(LENGTHS)]
    pages.run(cpu(), inputs[0], parts, spec)
    asked = [*inputs[0][:2], torch.cat([inputs[0][2][:32], normal(99, 1, HEADS, 64, dtype=torch.bfloat16)])]

    def last_token() -> Tensor:
        """One more token of sequence 2, at position 32 (rewritten each time), beside sequence 1."""
        return pages.run(cpu(), asked, [(1, 6, 7), (2, 32, 33)], spec)[1]

    clean = last_token()
    owned = {int(s) for s in pages.slots(2, 0 if window is None else 23, 32)}
    for cache in (pages.cache.keys, pages.cache.values):
        for slot in range(cache.shape[0] * 4):
            place = (slot // 4, slice(None), slot % 4)
            kept = cache[place].clone()
            if slot in {int(s) for s in [*pages.slots(2, 32, 33), *pages.slots(1, 6, 7)]}:
                continue  # rewritten by the step itself
            cache[place] = torch.inf
            assert (unequal(clean, last_token()) > 0) == (slot in owned), f"slot {slot}"
            cache[place] = kept


def test_control_one_ulp_in_a_key_is_seen_by_later_queries_only() -> None:
    q, k, v = (normal(i, 30, n, 64) for i, n in enumerate((HEADS, KV_HEADS, KV_HEADS)))
    changed = k.clone()
    changed.view(torch.int32)[12, 0] += 1
    cu, spec = torch.tensor([0, 30]), AttentionSpec(0.125)
    before, after = (cpu().attention_packed(q, keys, v, cu, spec)[0] for keys in (k, changed))
    assert unequal(before[:12], after[:12]) == 0
    assert unequal(before[12:, :3], after[12:, :3]) > 0
    assert unequal(before[12:, 3:], after[12:, 3:]) == 0


def test_padding_is_not_written_and_rows_beyond_the_batch_are_zero() -> None:
    q, k, v = (t[1] for t in sequences(torch.bfloat16, 32))
    for operations in (cpu(), load_provider("reference")):
        pages = Pages([k], [v], 4, seed=1)
        operations.write_kv(k, v, pages.cache, torch.cat([pages.slots(0, 0, 5), torch.tensor([-1, -1])]))
        assert int((~pages.cache.keys.isnan()).sum()) == 5 * KV_HEADS * 32
        batch = PagedBatch(torch.tensor([0, 5]), torch.tensor([5]), pages.table)
        o = operations.attention_paged(q, pages.cache, batch, AttentionSpec(0.125))
        assert bool((o[:5] != 0).any())
        assert int((o[5:] != 0).sum()) == 0
        held = torch.full_like(o, 7.0)
        assert operations.attention_paged(q, pages.cache, batch, AttentionSpec(0.125), held) is held
        assert unequal(held[:5], o[:5]) == 0
        assert bool((held[5:] == 7).all()), "what was there stays"


@pytest.mark.parametrize(
    "out", [torch.zeros(6, HEADS, 32), torch.zeros(7, HEADS, 32).double(), torch.zeros(7, 32, HEADS).mT]
)
def test_a_result_that_is_not_like_the_queries_is_refused(out: Tensor) -> None:
    q, k, v = (t[1] for t in sequences(torch.float32, 32))
    pages, batch = Pages([k], [v], 4, seed=1), PagedBatch(torch.tensor([0, 7]), torch.tensor([7]), torch.zeros(1, 2))
    with pytest.raises(ValueError, match=r"cannot attend from torch\.float32 \(7, 6, 32\) into"):
        load_provider("reference").attention_paged(q, pages.cache, batch, AttentionSpec(0.125), out)


def test_a_block_table_that_points_outside_the_cache_is_refused() -> None:
    q, k, v = (t[1] for t in sequences(torch.bfloat16, 32))
    pages = Pages([k], [v], 4, seed=1)
    table = torch.full_like(pages.table, 1000)
    batch = PagedBatch(torch.tensor([0, 7]), torch.tensor([7]), table)
    with pytest.raises(RuntimeError, match="page outside the cache"):
        cpu().attention_paged(q, pages.cache, batch, AttentionSpec(0.125))
