"""The verdict on planted evidence."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from vime_core.types import Float32Array
from vime_core.verify.gradient import (
    FACTOR,
    ROUNDING,
    Backward,
    GradientEvidence,
    TensorError,
    gradient_verdict,
)
from vime_core.verify.taken import Taken

BF16 = ROUNDING["bf16"]


def rows(seed: int = 0) -> tuple[Float32Array, ...]:
    rng = np.random.default_rng(seed)
    return tuple(rng.uniform(-4, -0.1, length).astype(np.float32) for length in (3, 5))


GRADIENTS = {"x": "3", "y": "4", "z": "5"}
TAKEN = tuple(Taken(name, 1.0, 1e-7) for name in GRADIENTS)
NUMBERS = {"loss": "0x1p-2", "gradient norm": "0x1p+0"}
STEP = Backward("a train step", GRADIENTS, NUMBERS, rows(), norm=1.0, taken=TAKEN)
AGAIN = replace(STEP, name="again")
ALONE = Backward("gradients alone", GRADIENTS, {})
RECOMPUTED = replace(ALONE, name="recomputed")
ERRORS = (TensorError("x", 10, 0.02, 0.02, 0.01, BF16), TensorError("y", 20, 0.001, 0.002, 0.01, BF16))
EVIDENCE = GradientEvidence("bf16", rows(), (STEP, AGAIN, ALONE, RECOMPUTED), ERRORS, norm=3.0)


def with_pass(number: int, **changes: Any) -> GradientEvidence:
    passes = [*EVIDENCE.passes]
    passes[number] = replace(passes[number], **changes)
    return replace(EVIDENCE, passes=tuple(passes))


def test_good_evidence_holds() -> None:
    verdict = gradient_verdict(EVIDENCE)
    assert verdict.exit_code == 0, verdict.sentence
    assert (verdict.coverage.samples, verdict.coverage.tokens, verdict.coverage.tensors) == (2, 8, 12)
    assert verdict.coverage.log_probs == 16  # of the two passes that are train steps
    assert "4 backward passes, 2 of them train steps, gave the same bits (12 gradients" in verdict.sentence
    assert "the optimizer took them, clipped (6 tensors" in verdict.sentence
    assert "worst 'x', relative error 0.02, bound 0.08" in verdict.sentence
    assert json.loads(json.dumps(verdict.as_json(), allow_nan=False))["details"]["checked_against_fp64"] == 2


@pytest.mark.parametrize(
    ("number", "gradients", "name"),
    [
        (1, {"x": "3", "y": "4", "z": "9"}, "z"),
        (2, {"x": "9", "y": "4", "z": "5"}, "x"),
        (3, {"x": "3", "z": "5"}, "y"),
        (1, GRADIENTS | {"w": "6"}, "w"),
    ],
)
def test_another_gradient_the_second_time(number: int, gradients: dict[str, str], name: str) -> None:
    verdict = gradient_verdict(with_pass(number, gradients=gradients))
    assert verdict.exit_code == 1
    assert verdict.first == f"pass {number}, gradient '{name}'"
    assert f"first '{name}'" in verdict.sentence


@pytest.mark.parametrize(("name", "value"), [("loss", "0x1.1p-2"), ("gradient norm", "0x1.0000000000001p+0")])
def test_another_number_the_second_time(name: str, value: str) -> None:
    verdict = gradient_verdict(with_pass(1, numbers={**STEP.numbers, name: value}))
    assert (verdict.exit_code, verdict.first) == (1, f"pass 1, {name}")


def test_a_gradient_that_is_missing_says_where() -> None:
    verdict = gradient_verdict(with_pass(0, gradients={"x": "3", "z": "5"}))
    assert (verdict.exit_code, verdict.first) == (1, "pass 1, gradient 'y'")
    assert "1 of 3 gradients, first 'y', which a train step lacks" in verdict.sentence


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (Taken("y", -1.0, 2.0), "first -1 times that of 'y', relative error 2"),
        (Taken("y", 0.0, 1.0), "first 0 times that of 'y'"),
        (Taken("y", 1.001, 1e-3), "1.001 times"),
        (Taken("y", math.nan, math.nan), "nan times"),
    ],
)
def test_an_optimizer_that_took_another_gradient(wrong: Taken, words: str) -> None:
    verdict = gradient_verdict(with_pass(1, taken=(TAKEN[0], wrong, TAKEN[2])))
    assert (verdict.exit_code, verdict.first) == (1, "pass 1, gradient 'y' in the optimizer")
    assert words in verdict.sentence


def test_a_norm_that_is_not_that_of_the_gradients() -> None:
    verdict = gradient_verdict(with_pass(1, norm=1.001))
    assert (verdict.exit_code, verdict.first) == (1, "pass 1, gradient norm")
    assert gradient_verdict(with_pass(1, norm=math.nan)).exit_code == 1
    assert gradient_verdict(with_pass(1, norm=0.0)).exit_code == 1


def test_a_nan_that_repeats_is_no_equality() -> None:
    nan = {"loss": "nan", "gradient norm": "0x1p+0"}
    passes = tuple(replace(one, numbers=nan) for one in (STEP, AGAIN))
    assert gradient_verdict(replace(EVIDENCE, passes=passes)).exit_code == 1


def test_a_training_forward_one_ulp_off() -> None:
    other = [row.copy() for row in rows()]
    other[1].view(np.uint32)[2] += np.uint32(1)
    verdict = gradient_verdict(with_pass(0, log_probs=tuple(other)))
    assert (verdict.exit_code, verdict.first) == (1, "pass 0, response token 5")
    assert (verdict.unequal, verdict.largest_ulps) == (1, 1)
    assert "gives other bits than the scoring forward" in verdict.sentence


def test_nan_in_both_forwards() -> None:
    nan = [row.copy() for row in rows()]
    nan[0][0] = np.nan
    passes = tuple(replace(one, log_probs=tuple(nan)) for one in (STEP, AGAIN))
    verdict = gradient_verdict(replace(EVIDENCE, scored=tuple(nan), passes=passes))
    assert verdict.exit_code == 1
    assert math.isnan(verdict.largest_difference)


def test_other_lengths() -> None:
    verdict = gradient_verdict(with_pass(0, log_probs=(rows()[0], rows()[1][:4])))
    assert (verdict.exit_code, verdict.first) == (1, "pass 0, lengths")


@pytest.mark.parametrize("error", [0.081, 1.0, math.inf, math.nan])
def test_a_gradient_outside_its_bound(error: float) -> None:
    errors = (replace(ERRORS[0], error=error), ERRORS[1])
    verdict = gradient_verdict(replace(EVIDENCE, errors=errors))
    assert (verdict.exit_code, verdict.first, verdict.unequal) == (1, "gradient 'x'", 1)
    assert "farther from fp64 autograd" in verdict.sentence


def test_the_bound() -> None:
    """At least a rounding, at most what plain transformers is off by, times the factor; too wide a one says nothing."""
    assert TensorError("x", 1, 0.0, 0.0, 0.0, ROUNDING["fp32"]).bound == FACTOR * 2.0**-24
    assert TensorError("x", 1, 0.0, 0.1, 0.05, BF16).bound == FACTOR * 0.1
    assert TensorError("x", 1, 0.0, 0.01, 0.05, BF16).bound == FACTOR * 0.05
    assert TensorError("x", 1, 0.0, 0.3, 0.0, BF16).noisy
    assert TensorError("x", 1, 0.0, math.nan, 0.0, BF16).noisy


def test_a_gradient_that_drowns_is_left_out_and_said() -> None:
    drowned = TensorError("z", 5, 0.9, 0.8, 0.01, BF16)
    verdict = gradient_verdict(replace(EVIDENCE, errors=(*ERRORS, drowned)))
    assert verdict.exit_code == 0
    assert "1 more drown in the rounding of bf16" in verdict.sentence
    everything = gradient_verdict(replace(EVIDENCE, errors=(drowned,)))
    assert (everything.exit_code, everything.first) == (3, "reference")
    not_a_number = gradient_verdict(replace(EVIDENCE, errors=(*ERRORS, replace(drowned, error=math.nan))))
    assert not_a_number.exit_code == 1


FLAT = tuple(np.full(n, -5.5, dtype=np.float32) for n in (3, 5))
UNCHECKED: dict[str, tuple[GradientEvidence, str]] = {
    "one pass": (replace(EVIDENCE, passes=(STEP,)), "was not done twice"),
    "no forward": (replace(EVIDENCE, passes=(ALONE, RECOMPUTED)), "shows no log-probs"),
    "no moments": (with_pass(1, taken=()), "unknown which gradients it took"),
    "nothing": (GradientEvidence("bf16", (), ()), "no token was scored"),
    "no reference": (replace(EVIDENCE, errors=(), not_tried="transformers is absent"), "transformers is absent"),
    "no tensors": (replace(EVIDENCE, errors=()), "rounding drowns every gradient"),
    "zero": (replace(EVIDENCE, norm=0.0), "the norm of all gradients is 0"),
    "norm that is no number": (replace(EVIDENCE, norm=math.nan), "the norm of all gradients is nan"),
    "constant": (
        replace(EVIDENCE, scored=FLAT, passes=tuple(replace(one, log_probs=FLAT) for one in (STEP, AGAIN))),
        "hardly vary",
    ),
}


@pytest.mark.parametrize("name", UNCHECKED)
def test_what_proves_nothing_is_not_checked(name: str) -> None:
    evidence, words = UNCHECKED[name]
    verdict = gradient_verdict(evidence)
    assert verdict.exit_code == 3
    assert words in verdict.sentence
