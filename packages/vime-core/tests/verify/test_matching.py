"""Each fault of pairing is found and named, whichever side has it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from vime_core.types import SampleRequest
from vime_core.verify.matching import Scored, matching_faults

REQUESTS = [
    SampleRequest(prompt, sample, (1, 2, prompt), seed=10 * prompt + sample, max_tokens=4)
    for prompt in range(2)
    for sample in range(2)
]


def scored(version: int = 4) -> list[Scored]:
    return [Scored(r.key, (3, 4, 5), np.array([-1, -2, -0.5 * r.seed], dtype=np.float32), version) for r in REQUESTS]


def kinds(requests: list[SampleRequest], engine: list[Scored], trainer: list[Scored]) -> list[tuple[str, object]]:
    return [(fault.kind, fault.key) for fault in matching_faults(requests, engine, trainer, 4)]


def test_sides_that_match_have_no_fault() -> None:
    assert kinds(REQUESTS, scored(), scored()) == []
    assert kinds(REQUESTS, scored(), scored()[::-1]) == []  # packing decides the trainer's order


@pytest.mark.parametrize("side", ["engine", "trainer"])
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda s: [*s[:2], s[3]], [("missing sample", (1, 0))]),
        (lambda s: [*s, s[1]], [("duplicated sample", (0, 1))]),
        (lambda s: [s[0], s[1], s[1], s[3]], [("duplicated sample", (0, 1)), ("missing sample", (1, 0))]),
        (lambda s: [*s, replace(s[0], key=(9, 0))], [("foreign sample", (9, 0))]),
        (lambda s: [replace(s[0], weight_version=3), *s[1:]], [("weight version", (0, 0))]),
        (lambda s: [replace(s[0], log_probs=s[0].log_probs[:2]), *s[1:]], [("dropped token", (0, 0))]),
        (
            lambda s: [replace(s[0], log_probs=np.append(s[0].log_probs, s[0].log_probs)), *s[1:]],
            [("dropped token", (0, 0))],
        ),
        (
            lambda s: [replace(s[0], tokens=(3, 4), log_probs=s[0].log_probs[:2]), *s[1:]],
            [("dropped token", (0, 0))],
        ),
        (lambda s: [replace(s[0], tokens=(3, 4, 6)), *s[1:]], [("other tokens", (0, 0))]),
    ],
    ids=[
        "missing",
        "duplicated added",
        "duplicated instead",
        "foreign",
        "version",
        "value",
        "more values",
        "token",
        "other id",
    ],
)
def test_planted_faults(side: str, change: object, expected: list[tuple[str, object]]) -> None:
    assert callable(change)
    changed = change(scored())
    sides = (changed, scored()) if side == "engine" else (scored(), changed)
    assert kinds(REQUESTS, *sides) == expected


def test_a_response_cut_at_its_length_has_that_length() -> None:
    """A token that is lost with its log-prob leaves two sides that agree."""
    whole = [replace(one, tokens=(3, 4, 5, 6), log_probs=np.full(4, -1, dtype=np.float32)) for one in scored()]
    whole = [replace(one, finish="length") for one in whole]
    assert kinds(REQUESTS, whole, whole) == []
    lost = [replace(whole[0], tokens=(3, 4, 5), log_probs=whole[0].log_probs[:3]), *whole[1:]]
    assert kinds(REQUESTS, lost, lost) == [("dropped token", (0, 0))]


@pytest.mark.parametrize(("twin", "name"), [(2, "prompt 1, sample 0"), (1, "prompt 0, sample 1")])
def test_equal_seeds_for_two_prompts_and_for_two_samples_of_one(twin: int, name: str) -> None:
    requests = [*REQUESTS]
    requests[twin] = replace(requests[twin], seed=REQUESTS[0].seed)
    faults = matching_faults(requests, scored(), scored(), 4)
    assert [(f.kind, f.key) for f in faults] == [("equal seeds", REQUESTS[twin].key)]
    assert str(faults[0]) == f"equal seeds: {name}: it has the seed 0 of prompt 0, sample 0"


def test_an_engine_that_answers_as_it_finishes() -> None:
    done = scored()
    assert kinds(REQUESTS, [done[1], done[0], done[3], done[2]], scored()) == [("collection order", (0, 1))]


def test_nothing_requested_is_no_fault_but_nothing_answered_is() -> None:
    assert kinds([], [], []) == []
    assert [kind for kind, _ in kinds(REQUESTS, [], [])] == ["missing sample"] * 8


def test_a_response_ends_at_its_stop_token_and_nowhere_else() -> None:
    stopped = [replace(one, finish="stop") for one in scored()]
    asked = [replace(request, stop_token_ids=(5,)) for request in REQUESTS]

    def found(requests: list[SampleRequest], engine: list[Scored], stops: frozenset[int] | None) -> list[str]:
        return [str(fault.kind) for fault in matching_faults(requests, engine, engine, 4, stops)]

    assert found(asked, stopped, frozenset()) == []
    assert found(REQUESTS, stopped, frozenset({5})) == []
    lost = [replace(one, tokens=one.tokens[:-1], log_probs=one.log_probs[:-1]) for one in stopped]
    assert set(found(asked, lost, frozenset())) == {"dropped token"}
    assert found(asked, lost, None) == []  # an engine that does not say which tokens stop
    assert set(found(REQUESTS, scored(), frozenset({4}))) == {"other tokens"}
    assert set(found(REQUESTS, stopped, frozenset({4, 5}))) == {"other tokens"}  # it ends at one, and went on after one
