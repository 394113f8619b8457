"""The indexer: UE8M0 scales, packed keys, scores, and a top-k that is a total order."""

from __future__ import annotations

import math
import struct

import torch
from glm5_support import assert_same, check_rows, normal, unequal
from hypothesis import given
from hypothesis import strategies as st

from vime_glm5.numerics import Glm5Operations, index_keys, index_scores, layer_norm, top_k


@given(st.floats(2.0**-20, 2.0**20, width=32), st.integers(0, 127))
def test_scales_are_powers_of_two(amax: float, place: int) -> None:
    x = torch.zeros(1, 128)
    x[0, place] = amax
    _, scale = index_keys.quantise(x)
    ratio = float(torch.tensor(max(amax, 1e-4), dtype=torch.float32) / torch.tensor(448.0))
    assert float(scale) >= ratio
    assert float(scale) / 2 < ratio
    assert math.frexp(float(scale))[0] == 0.5


def test_a_scale_that_is_a_power_already_stays() -> None:
    assert float(index_keys.quantise(torch.full((1, 128), 448.0 * 8))[1]) == 8.0


def test_zeros_stay_finite() -> None:
    q, scale = index_keys.quantise(torch.zeros(2, 128))
    assert not q.float().any()
    assert (scale > 0).all()


def test_bytes_of_a_key() -> None:
    x = normal(0, 3, 128)
    rows, (q, scales) = index_keys.pack(x), index_keys.quantise(x)
    assert rows.shape == (3, 132)
    for row, scale in zip(rows, scales, strict=True):
        assert struct.unpack("<f", bytes(row[128:].tolist()))[0] == float(scale)
    found = index_keys.unpack(rows)
    assert_same(found[0], q)
    assert_same(found[1], scales)


def _scores(t: int, n: int, heads: int = 4, seed: int = 1) -> tuple[torch.Tensor, ...]:
    q, sq = index_keys.quantise(normal(seed, t, heads, 128))
    weights = index_scores.head_weights(normal(seed + 1, t, heads), sq, 128)
    return (q, weights, *index_keys.quantise(normal(seed + 2, n, 128)))


def test_scores_against_fp64() -> None:
    q, w, k, sk = _scores(9, 30)
    exact = torch.einsum("thn,th->tn", torch.einsum("thd,nd->thn", q.double(), k.double()).relu(), w.double()) * sk
    found = index_scores.reference(q, w, k, sk)
    assert (found - exact).abs().max() < 1e-5 * exact.abs().max()


def test_a_score_depends_on_its_query_and_key_alone() -> None:
    q, w, k, sk = _scores(9, 30)
    whole = index_scores.reference(q, w, k, sk)
    for a, b in ((0, 1), (3, 7)):
        assert_same(index_scores.reference(q[a:b], w[a:b], k[: 5 * b], sk[: 5 * b]), whole[a:b, : 5 * b])
    order = torch.randperm(30)
    assert_same(index_scores.reference(q, w, k[order], sk[order]), whole[:, order])


_PLATEAU = st.lists(st.sampled_from([0.0, -0.0, 1.0, 2.0, -3.0, math.inf, -math.inf, math.nan]), min_size=1)


@given(_PLATEAU, st.integers(1, 12))
def test_top_k_is_a_stable_descending_sort(values: list[float], k: int) -> None:
    scores = torch.tensor([values])
    known = [-math.inf if math.isnan(v) else v + 0.0 for v in values]
    wanted = sorted(sorted(range(len(values)), key=lambda i: (-known[i], i))[:k])
    found = top_k.reference(scores, torch.tensor([len(values)]), k)[0].tolist()
    assert found == wanted + [-1] * (k - len(wanted))


def test_ties_go_to_the_first_index() -> None:
    scores = torch.tensor([[1.0, 0.0, 0.0, -0.0, 0.0, 2.0]])
    assert top_k.reference(scores, torch.tensor([6]), 4).tolist() == [[0, 1, 2, 5]]
    assert top_k.best(scores, 4).tolist() == [[5, 0, 1, 2]]


def test_what_is_not_visible_is_not_chosen() -> None:
    scores = torch.arange(20.0).expand(5, 20)
    found = top_k.reference(scores, torch.tensor([1, 3, 4, 10, 20]), 4)
    assert found.tolist() == [[0, -1, -1, -1], [0, 1, 2, -1], [0, 1, 2, 3], [6, 7, 8, 9], [16, 17, 18, 19]]


def test_choice_is_the_same_in_any_company(every: Glm5Operations) -> None:
    q, w, _, _ = _scores(16, 50)
    rows = every.pack_index_keys(normal(8, 50, 128))
    visible = torch.arange(35, 51)
    whole = every.choose_keys(q, w, rows, visible, 32)
    for t in range(16):
        alone = every.choose_keys(q[t : t + 1], w[t : t + 1], rows[: visible[t]], visible[t : t + 1], 32)
        assert alone.tolist() == whole[t : t + 1].tolist()


def test_plateaus_of_zeros_are_cut() -> None:
    """ReLU gives exact zeros, and some of them lie at the boundary: without an order of ties the set is open."""
    q, w, k, sk = _scores(60, 60, heads=1)
    scores = index_scores.reference(q, w.abs(), k, sk)
    cut = scores.sort(descending=True).values
    assert int((cut[:, 44] == cut[:, 45]).sum()) > 10


def test_layer_norm(every: Glm5Operations) -> None:
    x, w, b = normal(3, 21, 128), normal(4, 128), normal(5, 128)
    exact = torch.nn.functional.layer_norm(x.double(), (128,), w.double(), b.double(), 1e-6)
    found = every.layer_norm(x, w, b, 1e-6)
    assert (found.double() - exact).abs().max() < 2.0**-7 * exact.abs().max()
    check_rows(lambda x: every.layer_norm(x, w, b, 1e-6), x)
    wide = layer_norm.reference(x.float(), w.float(), b.float(), 1e-6)
    assert (wide - exact).abs().max() < 2e-6 * exact.abs().max()
    assert unequal(layer_norm.reference(x, w, b, 1e-2), found) > 100
