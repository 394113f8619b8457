from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from synthetic import flip_bit, make_step

from vime_core.errors import RecordError
from vime_core.record.digest import array_digest, merkle_root
from vime_core.record.samples import log_prob_digest, sample_columns, samples_from, step_digests
from vime_core.types import KeptTokens, Sample

STEP = make_step(0)
STAGE_OF_FIELD = {
    "dataset_index": ("prompts", 99),
    "prompt_tokens": ("prompts", (1, 9, 3)),
    "seed": ("prompts", 0),
    "response_tokens": ("tokens", (0,) * len(STEP.samples[1].response_tokens)),
    "loss_mask": ("tokens", (False,) * len(STEP.samples[1].response_tokens)),
    "weight_version": ("tokens", 5),
    "finish_reason": ("tokens", "abort"),
    "response_text": ("tokens", "other"),
    "kept": ("tokens", KeptTokens((3,), (1, *(0,) * (len(STEP.samples[1].response_tokens) - 1)))),
    "rollout_log_probs": ("rollout_log_probs", flip_bit(STEP.samples[1].rollout_log_probs, 0)),
    "reward": ("rewards", 0.5),
}


def with_sample(**changes: object) -> tuple[Sample, ...]:
    return (STEP.samples[0], replace(STEP.samples[1], **changes), *STEP.samples[2:])


def test_every_field_of_a_sample_belongs_to_one_stage() -> None:
    assert set(STAGE_OF_FIELD) == set(Sample.__dataclass_fields__) - {"prompt_index", "sample_index"}


@pytest.mark.parametrize("field", STAGE_OF_FIELD)
def test_a_changed_field_changes_its_stage_alone(field: str) -> None:
    stage, value = STAGE_OF_FIELD[field]
    before, after = (vars(step_digests(s, STEP.advantages)) for s in (STEP.samples, with_sample(**{field: value})))
    assert [name for name in before if before[name] != after[name]] == [stage]


def test_a_changed_key_changes_every_stage() -> None:
    moved = (*STEP.samples[:3], replace(STEP.samples[3], sample_index=7))
    before, after = (vars(step_digests(samples, STEP.advantages)) for samples in (STEP.samples, moved))
    assert all(before[name] != after[name] for name in before)


def test_advantages_have_their_own_digest() -> None:
    before, after = (step_digests(STEP.samples, a) for a in (STEP.advantages, flip_bit(STEP.advantages, 2)))
    assert before.advantages != after.advantages
    assert replace(after, advantages=before.advantages) == before


def test_stage_digest_is_the_documented_one() -> None:
    samples = STEP.samples
    keys = {
        "prompt_index": np.array([s.prompt_index for s in samples], dtype=np.int64),
        "sample_index": np.array([s.sample_index for s in samples], dtype=np.int64),
    }
    reward = {**keys, "reward": np.array([s.reward for s in samples])}
    lists = {
        **keys,
        "log_probs.lengths": np.array([len(s.response_tokens) for s in samples], dtype=np.int64),
        "log_probs": np.concatenate([s.rollout_log_probs for s in samples]),
    }
    digests = step_digests(samples, STEP.advantages)
    assert digests.rewards == merkle_root({name: array_digest(name, value) for name, value in reward.items()})
    assert digests.rollout_log_probs == merkle_root({n: array_digest(n, value) for n, value in lists.items()})


def test_equal_log_probs_of_rollout_and_trainer_have_equal_digests() -> None:
    digest = log_prob_digest([s.key for s in STEP.samples], [s.rollout_log_probs for s in STEP.samples])
    assert digest == step_digests(STEP.samples, STEP.advantages).rollout_log_probs


def test_where_a_list_ends_matters() -> None:
    a = [np.ones(1, dtype=np.float32), np.ones(2, dtype=np.float32)]
    assert log_prob_digest([(0, 0), (0, 1)], a) != log_prob_digest([(0, 0), (0, 1)], a[::-1])


def test_columns_give_the_samples_back() -> None:
    counts = [(2, *(0,) * (len(s.response_tokens) - 2), 1) for s in STEP.samples]
    cut = [
        replace(s, kept=KeptTokens((1, 5, 2), c)) if s.sample_index else s
        for s, c in zip(STEP.samples, counts, strict=True)
    ]
    assert step_digests(cut, STEP.advantages).tokens != step_digests(STEP.samples, STEP.advantages).tokens
    for before, after in zip(cut, samples_from(sample_columns(cut)), strict=True):
        np.testing.assert_array_equal(before.rollout_log_probs, after.rollout_log_probs)
        assert replace(before, rollout_log_probs=None) == replace(after, rollout_log_probs=None)  # type: ignore[arg-type]
    assert samples_from(sample_columns([])) == []


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (STEP.samples[::-1], r"sample \(1, 0\) stands after \(1, 1\)"),
        ((STEP.samples[0], STEP.samples[0]), r"sample \(0, 0\) comes twice"),
        (with_sample(loss_mask=(True,)), r"loss_mask of sample \(0, 1\) has 1 values for 4"),
        (with_sample(rollout_log_probs=np.zeros(1, np.float32)), r"rollout_log_probs of sample \(0, 1\) has 1"),
        (with_sample(rollout_log_probs=np.zeros(4)), r"rollout_log_probs of sample \(0, 1\) is float64 \(4,\)"),
        (with_sample(kept=KeptTokens((1,), (1,))), r"kept of sample \(0, 1\) has 1 counts and 1 tokens for 4"),
        (with_sample(kept=KeptTokens((1,), (0, 0, 0, 2))), r"kept of sample \(0, 1\) has 4 counts and 1 tokens"),
        (with_sample(seed=-1), "seed of a sample is no uint64"),
        (with_sample(response_tokens=(2**31, 0, 0, 0)), "response_tokens of a sample is no int32"),
    ],
)
def test_samples_that_do_not_fit_are_refused(samples: tuple[Sample, ...], message: str) -> None:
    with pytest.raises(RecordError, match=message):
        step_digests(samples, np.zeros(len(samples), dtype=np.float32))


@pytest.mark.parametrize("advantages", [np.zeros(3, np.float32), np.zeros(4), np.zeros((4, 1), np.float32)])
def test_advantages_that_do_not_fit_are_refused(advantages: np.ndarray) -> None:
    with pytest.raises(RecordError, match=r"advantages are .* for 4 samples, not float32"):
        step_digests(STEP.samples, advantages)
