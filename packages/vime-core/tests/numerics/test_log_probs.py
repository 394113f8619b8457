"""Log-probs at a temperature, and the masks of top-k and top-p, by brute force and at their edges."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numerics_support import DTYPES, assert_same, cpu, everyone, next_up, normal, unequal
from torch import Tensor

from vime_core.errors import ConfigError
from vime_core.numerics import load_provider, masked
from vime_core.numerics.arithmetic import exp


@given(st.integers(1, 6), st.integers(1, 500), st.sampled_from(DTYPES), st.floats(0.1, 2), st.integers(0, 9))
def test_gathered_is_gather(m: int, v: int, dtype: torch.dtype, temperature: float, seed: int) -> None:
    logits = normal(seed, m, v, dtype=dtype, scale=4)
    ids = torch.randint(0, v, (m,), generator=torch.Generator().manual_seed(seed))
    full = cpu().log_softmax(logits, temperature)
    assert_same(full.gather(1, ids[:, None])[:, 0], cpu().token_log_probs(logits, ids, temperature))


def test_greedy_is_scored_at_one() -> None:
    logits = normal(0, 3, 100)
    assert_same(cpu().log_softmax(logits, 0.0), cpu().log_softmax(logits, 1.0))
    assert_same(cpu().log_softmax(logits, 0), cpu().log_softmax(logits))
    ids, zeros, ones = torch.tensor([3, 0, 99]), torch.tensor([0.0, -0.0, 0.0]), torch.ones(3)
    for kernels in (operations.kernels for operations in everyone().values()):
        assert_same(kernels.log_softmax(logits, zeros), kernels.log_softmax(logits, ones))
        assert_same(kernels.token_log_probs(logits, ids, zeros), kernels.token_log_probs(logits, ids, ones))
        backward = kernels.token_log_probs_backward
        assert_same(backward(ones, logits, ids, zeros), backward(ones, logits, ids, ones))
        k, p = torch.full((3,), 9), torch.full((3,), 0.5)
        assert torch.equal(kernels.keep_mask(logits, zeros, k, p), kernels.keep_mask(logits, ones, k, p))


def test_the_gradient_of_greedy_is_that_at_one() -> None:
    found: list[Tensor] = []
    for temperature in (0.0, 1.0):
        logits = normal(0, 3, 100).requires_grad_()
        (cpu().log_softmax(logits, temperature) ** 2).sum().backward()
        assert logits.grad is not None
        found.append(logits.grad)
    assert_same(*found)


def test_a_temperature_for_each_row() -> None:
    logits, temperatures = normal(0, 4, 100), torch.tensor([0.0, 0.7, 1.0, 1.3])
    rows = [cpu().log_softmax(logits[i : i + 1], float(t)) for i, t in enumerate(temperatures)]
    assert_same(cpu().log_softmax(logits, temperatures), torch.cat(rows))


@pytest.mark.parametrize("temperature", [0.7, torch.tensor(0.7), torch.tensor([0.7]), torch.full((2, 3), 0.7)], ids=str)
def test_log_probs_have_the_shape_of_the_tokens_whatever_that_of_the_temperature(temperature: float | Tensor) -> None:
    logits, ids = normal(0, 6, 100), torch.tensor([3, 0, 99, 5, 7, 1])
    flat = cpu().token_log_probs(logits, ids, 0.7)
    assert_same(cpu().token_log_probs(logits.view(2, 3, 100), ids.view(2, 3), temperature), flat.view(2, 3))


def test_a_temperature_one_percent_off_is_seen() -> None:
    logits = normal(0, 3, 100)
    assert unequal(cpu().log_softmax(logits, 0.7), cpu().log_softmax(logits, 0.707)) > 250


@pytest.mark.parametrize("temperature", [-0.1, float("nan"), float("inf")])
def test_impossible_temperatures_are_refused(temperature: float) -> None:
    with pytest.raises(ConfigError, match="temperature is"):
        cpu().log_softmax(normal(0, 1, 4), temperature)


def test_ids_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(RuntimeError, match="token id 4 outside the vocabulary of 4"):
        cpu().token_log_probs(normal(0, 1, 4), torch.tensor([4]))


def test_nan_stays_nan_in_its_row() -> None:
    logits = normal(0, 3, 100)
    logits[1, 7] = torch.nan
    for operations in everyone().values():
        result = operations.log_softmax(logits)
        assert bool(result[1].isnan().all())
        assert not bool(result[[0, 2]].isnan().any())


def test_one_ulp_of_a_logit_reaches_its_row_only() -> None:
    logits = normal(0, 3, 100, scale=3)
    changed = logits.clone()
    largest = int(logits[1].argmax())
    changed[1, largest] = next_up(logits)[1, largest]
    a, b = cpu().log_softmax(logits), cpu().log_softmax(changed)
    assert unequal(a[1], b[1]) > 0
    assert unequal(a[[0, 2]], b[[0, 2]]) == 0


def test_masked_tokens_have_no_probability_and_no_gradient() -> None:
    logits = normal(0, 3, 100).requires_grad_()
    keep = cpu().keep_mask(logits.detach(), 0.7, 10, 0.9)
    ids = logits.argmax(-1)
    log_p = cpu().token_log_probs(masked(logits, keep), ids, 0.7)
    log_p.sum().backward()
    assert logits.grad is not None
    assert int((logits.grad[~keep] != 0).sum()) == 0
    kept = (logits.detach().double() / float(torch.tensor(0.7))).masked_fill(~keep, -torch.inf).log_softmax(-1)
    torch.testing.assert_close(log_p.detach(), kept.gather(1, ids[:, None])[:, 0].float(), rtol=1e-5, atol=1e-6)


def brute_force(z: Tensor, top_k: int, top_p: float) -> list[bool]:
    """The definition, token by token, in Python's integers."""
    values = [float(v) for v in z]
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    order = order[:top_k] if top_k else order
    weights = {i: int(float(exp(z[i] - z.max())) * 2**32) for i in order}
    total, before, keep = sum(weights.values()), 0, set[int]()
    for i in order:
        if top_p >= 1 or before < max(float(torch.tensor(top_p)) * total, 1.0):
            keep.add(i)
        before += weights[i]
    return [i in keep for i in range(len(values))]


@given(
    st.lists(
        st.sampled_from([0.0, -0.0, 1.0, 2.5, 2.5, -3.0, 30.0, -60.0]) | st.floats(-8, 8, width=32),
        min_size=1,
        max_size=40,
    ),
    st.integers(0, 12),
    st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.999, 1.0]),
)
def test_masks_by_brute_force(values: list[float], top_k: int, top_p: float) -> None:
    logits = torch.tensor([values])
    expected = brute_force(logits[0], top_k, top_p)
    for operations in everyone().values():
        assert operations.keep_mask(logits, 1.0, top_k, top_p)[0].tolist() == expected


def test_masks_are_those_of_transformers_where_nothing_ties() -> None:
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    logits = normal(0, 20, 3000, scale=3)
    ids = torch.zeros(20, 1, dtype=torch.long)
    theirs = TopPLogitsWarper(0.9)(ids, TopKLogitsWarper(50)(ids, logits))  # pyright: ignore[reportArgumentType]
    assert torch.equal(cpu().keep_mask(logits, 1.0, 50, 0.9), theirs.isfinite())


def test_ties_fall_to_the_smaller_id() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]])
    for operations in everyone().values():
        assert operations.keep_mask(logits, 1.0, 2).tolist() == [[False, True, True, False, False]]
        assert operations.keep_mask(logits, 1.0, 0, 0.5).tolist() == [[False, True, True, False, False]]
        for zeros in ([-0.0, 0.0], [0.0, -0.0]):
            assert operations.keep_mask(torch.tensor([zeros]), 1.0, 1).tolist() == [[True, False]]


def test_a_setting_for_each_row() -> None:
    logits = normal(0, 3, 50)
    k, p = torch.tensor([0, 5, 50]), torch.tensor([0.9, 0.5, 1.0])
    rows = [cpu().keep_mask(logits[i : i + 1], 1.0, int(k[i]), float(p[i])) for i in range(3)]
    assert torch.equal(cpu().keep_mask(logits, 1.0, k, p), torch.cat(rows))
    assert torch.equal(load_provider("reference").keep_mask(logits, 1.0, k, p), torch.cat(rows))
