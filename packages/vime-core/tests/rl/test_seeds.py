from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from vime_core.rl.seeds import DuplicateGroup, derive_key, duplicate_groups, keyed_hash, sample_seed
from vime_core.types import Sample

counters = st.integers(min_value=0, max_value=2**40)


def independent_seed(run_seed: int, step: int, prompt: int, sample: int) -> int:
    key = blake3(b"%d" % run_seed, derive_key_context="vime sample seed v1").digest()
    digest = blake3(b"%d,%d,%d" % (step, prompt, sample), key=key).digest()
    return int(np.frombuffer(digest[:8], "<u8")[0]) // 2


@given(counters, counters, counters, counters)
def test_seed_is_the_written_hash_and_in_range(run_seed: int, step: int, prompt: int, sample: int) -> None:
    seed = sample_seed(run_seed, step, prompt, sample)
    assert seed == independent_seed(run_seed, step, prompt, sample)
    assert 0 <= seed < 2**63


def test_seeds_are_frozen_values() -> None:
    assert [sample_seed(0, 0, 0, 0), sample_seed(42, 3, 17, 5)] == [6993807961510501103, 7942823224692290226]


def test_no_two_samples_of_a_run_share_a_seed() -> None:
    seeds = {sample_seed(7, step, prompt, sample) for step in range(20) for prompt in range(20) for sample in range(20)}
    assert len(seeds) == 8000


@pytest.mark.parametrize("other", [(2, 2, 3, 4), (1, 3, 3, 4), (1, 2, 4, 4), (1, 2, 3, 5), (1, 3, 2, 4), (1, 2, 4, 3)])
def test_every_argument_matters(other: tuple[int, int, int, int]) -> None:
    assert sample_seed(1, 2, 3, 4) != sample_seed(*other)


def test_counters_are_not_run_together() -> None:
    key = derive_key("test", 0)
    assert keyed_hash(key, 1, 23) != keyed_hash(key, 12, 3)


def test_purposes_do_not_share_streams() -> None:
    assert derive_key("sample seed", 1) != derive_key("data order", 1)


def test_torch_takes_the_largest_seed_and_ignores_high_bits_on_cpu() -> None:
    def draw(seed: int) -> list[float]:
        return torch.rand(4, generator=torch.Generator().manual_seed(seed)).tolist()

    assert draw(2**63 - 1) == draw(2**32 - 1)
    assert draw(5) != draw(6)


def make_sample(prompt: int, sample: int, tokens: tuple[int, ...], seed: int) -> Sample:
    return Sample(
        prompt_index=prompt,
        sample_index=sample,
        dataset_index=0,
        prompt_tokens=(1,),
        response_tokens=tokens,
        rollout_log_probs=np.zeros(len(tokens), np.float32),
        loss_mask=(True,) * len(tokens),
        reward=0.0,
        weight_version=0,
        finish_reason="stop",
        seed=seed,
    )


def test_duplicates_with_equal_seeds_are_an_alarm() -> None:
    samples = [make_sample(0, 1, (5, 6), 9), make_sample(0, 0, (5, 6), 9), make_sample(0, 2, (7,), 9)]
    assert duplicate_groups(samples) == [DuplicateGroup(0, (0, 1), equal_seeds=True)]


def test_duplicates_with_other_seeds_are_reported_without_alarm() -> None:
    samples = [make_sample(3, 0, (5,), 1), make_sample(3, 1, (5,), 2), make_sample(4, 0, (5,), 1)]
    assert duplicate_groups(samples) == [DuplicateGroup(3, (0, 1), equal_seeds=False)]


def test_one_shared_seed_among_three_duplicates_is_an_alarm() -> None:
    samples = [make_sample(0, i, (5,), seed) for i, seed in enumerate((1, 2, 1))]
    assert duplicate_groups(samples)[0].equal_seeds


def test_seeds_that_torch_cannot_tell_apart_are_equal() -> None:
    first = make_sample(0, 0, (5,), 1)
    assert duplicate_groups([first, replace(first, sample_index=1, seed=1 + 2**32)])[0].equal_seeds


def test_different_responses_are_no_duplicates() -> None:
    assert duplicate_groups([make_sample(0, 0, (5,), 1), make_sample(0, 1, (6,), 1)]) == []
