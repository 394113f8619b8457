"""The verdict on planted answers."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vime_core.verify.batch import (
    CIRCUMSTANCES,
    Answer,
    Breaking,
    Circumstance,
    Collected,
    Trial,
    batch_verdict,
    compare_answers,
)


def answer(number: int, length: int = 5) -> Answer:
    rng = np.random.default_rng(number)
    return Answer(tuple(range(length)), rng.uniform(-4, -0.1, length).astype(np.float32))


def trial(circumstance: Circumstance, number: int = 0, **changes: Any) -> Trial:
    made = Trial(circumstance, (number, 0), 17, 1.0, answer(number), answer(number))
    return replace(made, **changes)


TRIALS = [trial(name, number) for number in range(2) for name in CIRCUMSTANCES]


def with_trial(place: int, **changes: Any) -> Collected:
    trials = [*TRIALS]
    trials[place] = replace(trials[place], **changes)
    return Collected(tuple(trials))


def changed(number: int, token: int, ulps: int = 1) -> Answer:
    one = answer(number)
    values = one.log_probs.copy()
    values.view(np.uint32)[token] += np.uint32(ulps)
    return replace(one, log_probs=values)


def test_equal_answers_hold() -> None:
    verdict = batch_verdict(Collected(tuple(TRIALS)))
    assert verdict.exit_code == 0, verdict.sentence
    assert (verdict.coverage.samples, verdict.coverage.tokens, verdict.coverage.log_probs) == (12, 60, 60)
    assert all(name in verdict.sentence for name in CIRCUMSTANCES)
    circumstances = json.loads(json.dumps(verdict.as_json()))["details"]["circumstances"]
    assert circumstances["in company"] == {"trials": 2, "tokens": 10, "unequal": 0}


@pytest.mark.parametrize("place", range(len(TRIALS)))
def test_one_ulp_is_found(place: int) -> None:
    number = TRIALS[place].key[0]
    verdict = batch_verdict(with_trial(place, answer=changed(number, 3)))
    assert verdict.exit_code == 1
    assert verdict.first == f"{TRIALS[place].circumstance}, prompt {number}, sample 0, token 3"
    assert (verdict.unequal, verdict.largest_ulps) == (1, 1)
    assert "1 ulp apart" in verdict.sentence


def test_another_token_and_all_that_follows() -> None:
    alone = answer(0)
    other = Answer((0, 1, 9, 3, 4), alone.log_probs)
    compared = compare_answers(alone, other)
    assert (compared.first, compared.other_token, compared.unequal) == (2, True, 3)
    verdict = batch_verdict(with_trial(1, answer=other))
    assert verdict.first == "in company, prompt 0, sample 0, token 2"
    assert "token 2 alone and 9" in verdict.sentence


@pytest.mark.parametrize(
    ("other", "first", "unequal"),
    [
        (Answer((0, 1, 2, 3), answer(0).log_probs[:4]), 4, 1),
        (Answer((0, 1, 2, 3, 4), answer(0).log_probs[:4]), 4, 1),
        (Answer((), answer(0).log_probs[:0]), 0, 5),
        (Answer((*range(5), 8), np.append(answer(0).log_probs, np.float32(-1))), 5, 1),
    ],
    ids=["shorter", "lost log-prob", "empty", "longer"],
)
def test_other_lengths(other: Answer, first: int, unequal: int) -> None:
    compared = compare_answers(answer(0), other)
    assert (compared.first, compared.unequal) == (first, unequal)
    verdict = batch_verdict(with_trial(0, answer=other))
    assert verdict.exit_code == 1
    assert "tokens with" in verdict.sentence


@pytest.mark.parametrize("both", [False, True])
def test_nan_equals_nothing(both: bool) -> None:
    values = answer(0).log_probs.copy()
    values[2] = np.nan
    nan = replace(answer(0), log_probs=values)
    verdict = batch_verdict(with_trial(2, answer=nan, **({"alone": nan} if both else {})))
    assert verdict.exit_code == 1
    assert math.isnan(verdict.largest_difference)
    assert verdict.first.endswith("token 2")


@given(st.integers(0, len(TRIALS) - 1), st.integers(0, 4), st.integers(0, 31))
def test_any_flipped_bit(place: int, token: int, bit: int) -> None:
    number = TRIALS[place].key[0]
    values = answer(number).log_probs.copy()
    values.view(np.uint32)[token] ^= np.uint32(1 << bit)
    verdict = batch_verdict(with_trial(place, answer=replace(answer(number), log_probs=values)))
    assert (verdict.exit_code, verdict.first.split()[-1]) == (1, str(token))


def test_what_was_not_tried_is_not_checked() -> None:
    trials = tuple(one for one in TRIALS if one.circumstance != "in chunks")
    verdict = batch_verdict(Collected(trials, {"in chunks": "no switch"}))
    assert (verdict.exit_code, verdict.first) == (3, "in chunks")
    assert "in chunks (no switch)" in verdict.sentence
    without_reason = batch_verdict(Collected(trials))
    assert "in chunks (nothing was compared)" in without_reason.sentence


def test_empty_answers_try_nothing() -> None:
    none = Answer((), answer(0).log_probs[:0])
    trials = [replace(t, alone=none, answer=none) if t.circumstance == "in chunks" else t for t in TRIALS]
    assert batch_verdict(Collected(tuple(trials))).first == "in chunks"


def test_what_never_happens_is_said() -> None:
    trials = tuple(one for one in TRIALS if one.circumstance != "in chunks")
    verdict = batch_verdict(Collected(trials, never_happens={"in chunks": "chunked_prefill = False"}))
    assert verdict.exit_code == 0
    assert "in chunks never happens here: chunked_prefill = False" in verdict.sentence
    assert ", in chunks," not in verdict.sentence


def test_nothing_and_constants_are_not_checked() -> None:
    assert batch_verdict(Collected(())).exit_code == 3
    flat = Answer((1, 2), np.array([-5.5, -5.5], dtype=np.float32))
    verdict = batch_verdict(Collected(tuple(replace(one, alone=flat, answer=flat) for one in TRIALS)))
    assert verdict.exit_code == 3
    assert "hardly vary" in verdict.sentence


def test_the_smallest_company_is_named() -> None:
    collected = replace(with_trial(1, answer=changed(0, 0)), breaking=Breaking((3, 17), 9, True))
    verdict = batch_verdict(collected)
    assert "the smallest company that breaks it is 2 other prompts of 3, 17 tokens" in verdict.sentence
    assert verdict.details["smallest_company"] == [3, 17]
    alone = replace(collected, breaking=Breaking((3,), 9, False))
    assert "the smallest company found that breaks it is another prompt of 3 tokens" in batch_verdict(alone).sentence
