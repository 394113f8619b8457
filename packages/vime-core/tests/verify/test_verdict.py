from __future__ import annotations

import json
import math

import pytest

from vime_core.verify.verdict import Coverage, Verdict

COVERED = Coverage(steps=1, samples=2, tokens=3, tensors=4)


@pytest.mark.parametrize(("holds", "code"), [(True, 0), (False, 1), (None, 3)])
def test_exit_codes(holds: bool | None, code: int) -> None:
    assert Verdict("x", holds, "s", coverage=COVERED).exit_code == code


@pytest.mark.parametrize(
    "evidence",
    [
        {},
        {"coverage": Coverage()},
        {"coverage": Coverage(steps=3, samples=4)},
        {"coverage": COVERED, "unequal": 1},
        {"coverage": COVERED, "largest_ulps": 1},
        {"coverage": COVERED, "largest_difference": 1e-30},
        {"coverage": COVERED, "largest_difference": math.nan},
        {"coverage": COVERED, "first": "step 0"},
    ],
)
def test_nothing_holds_without_evidence(evidence: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="cannot hold on this evidence"):
        Verdict("x", True, "s", **evidence)  # type: ignore[arg-type]
    Verdict("x", False, "s", **evidence)  # type: ignore[arg-type]


def test_three_outcomes_are_no_truth_value() -> None:
    with pytest.raises(TypeError, match="three outcomes"):
        bool(Verdict("x", False, "s"))


def test_json_is_json() -> None:
    verdict = Verdict("x", False, "s", coverage=COVERED, largest_difference=math.nan, unequal=2, entropy=1.5)
    table = json.loads(json.dumps(verdict.as_json(), allow_nan=False))
    assert table["exit_code"] == 1
    assert table["holds"] is False
    assert table["largest_difference"] == "nan"
    assert table["coverage"] == {"steps": 1, "samples": 2, "tokens": 3, "tensors": 4, "longest": 0, "log_probs": 0}
    assert table["entropy"] == 1.5
