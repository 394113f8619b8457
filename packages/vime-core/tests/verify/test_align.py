"""The verdict on planted data: each fault keeps it from holding, and its place is named."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vime_core.types import Drawn, SampleRequest
from vime_core.verify.align import Findings, Phase, align_verdict
from vime_core.verify.layers import TapComparison, TapDifference, TapSummary
from vime_core.verify.matching import Scored
from vime_core.verify.spread import spread

REQUESTS = tuple(
    SampleRequest(prompt, sample, (1, prompt), seed=10 * prompt + sample, max_tokens=8)
    for prompt in range(2)
    for sample in range(2)
)
LENGTHS = (3, 1, 4, 2)


def rows(version: int) -> tuple[Scored, ...]:
    rng = np.random.default_rng(version)
    return tuple(
        Scored(r.key, tuple(range(n)), rng.uniform(-4, -0.1, n).astype(np.float32), version)
        for r, n in zip(REQUESTS, LENGTHS, strict=True)
    )


def phase(version: int, **changes: Any) -> Phase:
    scored = rows(version)
    made = Phase(version, REQUESTS, scored, scored, weights=3, changed=0.9 if version else None)
    training = scored if version < 2 else ()
    return replace(made, **{"training": training, **changes})


def phases(version: int = 1, **changes: Any) -> list[Phase]:
    """Three phases of which one is changed."""
    return [phase(v, **(changes if v == version else {})) for v in range(3)]


def with_value(sample: int, token: int, value: float, version: int = 1) -> tuple[Scored, ...]:
    scored = list(rows(version))
    row = scored[sample].log_probs.copy()
    row[token] = value
    scored[sample] = replace(scored[sample], log_probs=row)
    return tuple(scored)


def ulp_up(sample: int, token: int, version: int = 1) -> tuple[Scored, ...]:
    value = rows(version)[sample].log_probs[token]
    return with_value(sample, token, np.nextafter(value, np.float32(0)), version)


def test_equal_bits_hold() -> None:
    verdict = align_verdict(phases())
    assert verdict.exit_code == 0, verdict.sentence
    assert (verdict.coverage.steps, verdict.coverage.samples, verdict.coverage.tokens) == (3, 12, 30)
    assert verdict.coverage.log_probs == 50  # the third phase has no training forward
    assert verdict.changed == 0.9
    assert verdict.entropy == pytest.approx(-np.concatenate([o.log_probs for v in range(3) for o in rows(v)]).mean())
    assert "0 unequal" in verdict.sentence
    assert json.loads(json.dumps(verdict.as_json(), allow_nan=False))["exit_code"] == 0


@pytest.mark.parametrize("side", ["engine", "trainer", "training"])
def test_one_ulp_anywhere_does_not_hold(side: str) -> None:
    verdict = align_verdict(phases(**{side: ulp_up(2, 3)}))
    assert verdict.exit_code == 1
    assert verdict.first == "weight version 1, prompt 1, sample 0, token 3"
    assert (verdict.unequal, verdict.largest_ulps) == ((2 if side == "engine" else 1), 1)
    assert 0 < verdict.largest_difference < 1e-6
    assert "1 ulp apart" in verdict.sentence
    forward = "training" if side == "training" else "scoring"
    assert f"in the trainer's {forward} forward" in verdict.sentence


@given(st.integers(0, 2), st.integers(0, 3), st.data())
def test_any_flipped_bit_is_found_at_its_place(version: int, sample: int, data: st.DataObject) -> None:
    token = data.draw(st.integers(0, LENGTHS[sample] - 1))
    bit = data.draw(st.integers(0, 31))
    value = rows(version)[sample].log_probs[token : token + 1].copy()
    value.view(np.uint32)[0] ^= np.uint32(1 << bit)
    verdict = align_verdict(phases(version, trainer=with_value(sample, token, value[0], version)))
    assert verdict.exit_code == 1
    key = REQUESTS[sample].key
    assert verdict.first == f"weight version {version}, prompt {key[0]}, sample {key[1]}, token {token}"


@pytest.mark.parametrize("sides", [("engine",), ("trainer",), ("engine", "trainer"), ("engine", "trainer", "training")])
def test_nan_does_not_hold(sides: tuple[str, ...]) -> None:
    verdict = align_verdict(phases(**dict.fromkeys(sides, with_value(3, 1, math.nan))))
    assert verdict.exit_code == 1
    assert verdict.first == "weight version 1, prompt 1, sample 1, token 1"
    assert math.isnan(verdict.largest_difference)
    assert "NaN" in verdict.sentence
    assert verdict.as_json()["largest_difference"] == "nan"


def test_minus_zero_is_not_zero() -> None:
    zero, minus = with_value(0, 0, 0.0), with_value(0, 0, -0.0)
    verdict = align_verdict(phases(engine=zero, training=zero, trainer=minus))
    assert (verdict.exit_code, verdict.largest_ulps) == (1, 1)


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "duplicated sample": ({"engine": (*rows(1), rows(1)[1])}, "duplicated sample, prompt 0, sample 1"),
    "missing sample": ({"trainer": rows(1)[1:]}, "missing sample, prompt 0, sample 0"),
    "missing in training": ({"training": rows(1)[:-1]}, "missing sample, prompt 1, sample 1"),
    "weight version": (
        {"engine": tuple(replace(one, weight_version=0) for one in rows(1))},
        "weight version, prompt 0, sample 0",
    ),
    "dropped token": (
        {"trainer": (*rows(1)[:3], replace(rows(1)[3], log_probs=rows(1)[3].log_probs[:1]))},
        "dropped token, prompt 1, sample 1",
    ),
    "equal seeds": (
        {"requests": (*REQUESTS[:3], replace(REQUESTS[3], seed=REQUESTS[0].seed))},
        "equal seeds, prompt 1, sample 1",
    ),
    "collection order": ({"engine": rows(1)[::-1]}, "collection order, prompt 1, sample 1"),
    "other tokens": (
        {"trainer": (replace(rows(1)[0], tokens=(0, 1, 9)), *rows(1)[1:])},
        "other tokens, prompt 0, sample 0",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_pairing_do_not_hold(name: str) -> None:
    changes, place = FAULTS[name]
    verdict = align_verdict(phases(**changes))
    assert verdict.exit_code == 1
    assert verdict.first == f"weight version 1, {place}"
    assert place.split(",")[0] in verdict.sentence


def test_a_fault_of_the_last_comparison_does_not_hold() -> None:
    assert (
        align_verdict(phases(version=2, trainer=rows(2)[1:])).first
        == "weight version 2, missing sample, prompt 0, sample 0"
    )


def test_one_token_that_is_not_drawn_again_does_not_hold() -> None:
    again = {one.key: Drawn(one.tokens, one.log_probs) for one in rows(2)}
    assert align_verdict(phases(version=2, drawn=again)).exit_code == 0
    other = replace(again[0, 0], tokens=(0, 1, 9))
    verdict = align_verdict(phases(version=2, drawn={**again, (0, 0): other}))
    assert (verdict.exit_code, verdict.unequal) == (1, 1)
    assert verdict.first == "weight version 2, prompt 0, sample 0, token 2"


def test_a_weight_that_was_not_updated_is_named() -> None:
    verdict = align_verdict(phases(unequal_weights=("mlp.weight",)))
    assert verdict.exit_code == 1
    assert verdict.first == "weight version 1, weight 'mlp.weight'"
    assert "read another 'mlp.weight' than the trainer holds" in verdict.sentence


def test_several_weights_are_counted() -> None:
    verdict = align_verdict(phases(unequal_weights=("a", "b")))
    assert (verdict.unequal, "2 of 3 weights" in verdict.sentence) == (2, True)


def constant(version: int) -> tuple[Scored, ...]:
    return tuple(replace(one, log_probs=np.full_like(one.log_probs, -5.5)) for one in rows(version))


def empty(version: int) -> tuple[Scored, ...]:
    return tuple(replace(one, tokens=(), log_probs=one.log_probs[:0]) for one in rows(version))


def same(scored: tuple[Scored, ...]) -> dict[str, Any]:
    return {"engine": scored, "trainer": scored, "training": scored}


UNCHECKED: dict[str, tuple[list[Phase], str]] = {
    "no phases": ([], "no log-probs were compared after a weight update"),
    "no update": (phases()[:1], "no log-probs were compared after a weight update"),
    "no requests": ([phase(0, requests=(), **same(()))], "no sampled token was compared"),
    "no tokens": (phases(**same(empty(1))), "no sampled token was compared at weight version 1"),
    "constant": (phases(**same(constant(1))), "hardly vary at weight version 1"),
    "idle update": (phases(version=2, changed=0.49), "changed 49.0% of the bf16 weight elements, less than 50%"),
}


@pytest.mark.parametrize("name", UNCHECKED)
def test_what_proves_nothing_is_not_checked(name: str) -> None:
    given_phases, words = UNCHECKED[name]
    verdict = align_verdict(given_phases)
    assert (verdict.holds, verdict.exit_code) == (None, 3)
    assert verdict.sentence.startswith("Align could not be checked: ")
    assert words in verdict.sentence


def test_a_spread_that_is_no_number_shows_nothing() -> None:
    assert spread([np.array([-1, np.nan, -2], dtype=np.float32)]).near_constant


def test_a_difference_between_constants_is_still_a_difference() -> None:
    verdict = align_verdict(phases(**{**same(constant(1)), "trainer": rows(1)}))
    assert verdict.exit_code == 1


def test_without_a_contract_nothing_was_promised() -> None:
    assert "so none was promised" in align_verdict(phases(engine=ulp_up(0, 0))).sentence
    kept = align_verdict(phases(engine=ulp_up(0, 0)), Findings("dense/v1", cause="the moon is full"))
    assert "promised" not in kept.sentence
    assert kept.sentence.endswith("; the moon is full.")


def taps(unequal: int, faults: tuple[str, ...] = ()) -> Findings:
    first = TapDifference("layers.1.swiglu", 5, 2, 1.0, 2.0, 8, True) if unequal else None
    summary = TapSummary("layers.1.swiglu", 6, 60, unequal, 8 * unequal, 1.0 * unequal)
    return Findings("dense/v1", taps=(((1, 0), TapComparison((summary,), first, faults)),))


def test_unequal_taps_under_equal_log_probs_do_not_hold() -> None:
    verdict = align_verdict(phases(), taps(3))
    assert verdict.exit_code == 1
    assert verdict.first == "taps, prompt 1, sample 0, layers.1.swiglu, position 5"
    assert "layer 1, swiglu, position 5, element 2" in verdict.sentence
    assert "every tap before it is equal" in verdict.sentence
    assert (verdict.unequal, verdict.largest_ulps) == (3, 24)


def test_unequal_taps_of_the_last_sample_do_not_hold() -> None:
    both = replace(taps(0), taps=(*taps(0).taps, *taps(3).taps))
    assert align_verdict(phases(), both).exit_code == 1


def test_taps_of_one_side_do_not_hold() -> None:
    verdict = align_verdict(phases(), taps(0, ("tap 'q' was recorded by the engine only",)))
    assert verdict.exit_code == 1
    assert "was recorded by the engine only" in verdict.sentence


def test_taps_that_nobody_recorded_are_not_checked() -> None:
    verdict = align_verdict(phases(), Findings("dense/v1", taps=(((1, 0), TapComparison((), None, ())),)))
    assert verdict.exit_code == 3
    assert "neither side recorded a tap of prompt 1, sample 0" in verdict.sentence


def test_equal_taps_are_counted() -> None:
    verdict = align_verdict(phases(), taps(0))
    assert verdict.exit_code == 0
    assert "all 1 taps of 1 samples" in verdict.sentence
    assert verdict.coverage.tensors == 9 + 1


def test_the_first_unequal_tap_stands_in_the_sentence() -> None:
    verdict = align_verdict(phases(trainer=ulp_up(2, 0)), taps(3))
    assert "first unequal tap, of prompt 1, sample 0: layer 1, swiglu" in verdict.sentence
