"""Do two sides speak of the same samples? Each requested one once, whole, in order, of the right weights.

A comparison of log-probs is worth what its pairing is worth, so everything that could pair the wrong values is a fault
of its own, named, and found before any value is looked at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from vime_core.types import WHOLE_VOCABULARY, FinishReason, Float32Array, KeptTokens, SampleKey, SampleRequest

Side = Literal["engine", "trainer"]
FaultKind = Literal[
    "equal seeds",
    "duplicated sample",
    "missing sample",
    "foreign sample",
    "collection order",
    "weight version",
    "dropped token",
    "other tokens",
]


@dataclass(frozen=True)
class Scored:
    """What one side says of a sample: its response tokens and their log-probs, fp32 [R], of one weight version.

    ``kept`` is what top-k and top-p left to choose from, and ``finish`` why it ended, where the engine says that.
    """

    key: SampleKey
    tokens: tuple[int, ...]
    log_probs: Float32Array
    weight_version: int
    kept: KeptTokens = WHOLE_VOCABULARY
    finish: FinishReason | None = None


@dataclass(frozen=True)
class Fault:
    """Something that is not as it must be before log-probs can be compared. ``str`` of it is a clause."""

    kind: FaultKind
    key: SampleKey
    what: str

    @property
    def place(self) -> str:
        return f"{self.kind}, {sample_name(self.key)}"

    def __str__(self) -> str:
        return f"{self.kind}: {sample_name(self.key)}: {self.what}"


def sample_name(key: SampleKey) -> str:
    """``prompt 3, sample 1``."""
    return f"prompt {key[0]}, sample {key[1]}"


def matching_faults(
    requests: Sequence[SampleRequest],
    engine: Sequence[Scored],
    trainer: Sequence[Scored],
    weight_version: int,
    stops: frozenset[int] | None = None,
) -> list[Fault]:
    """Every fault of pairing: ``engine`` as it came back from the requests, ``trainer`` as it scored them.

    The trainer may score in any order, since packing decides it; the engine may not. ``stops`` are the tokens that end
    a response besides those of its request; None: the engine does not say.
    """
    faults = [*_seeds(requests)]
    wanted = [request.key for request in requests]
    faults += _of_side("engine", wanted, engine, weight_version)
    faults += _of_side("trainer", wanted, trainer, weight_version)
    if not faults:
        faults += _ends(requests, engine)
        faults += [] if stops is None else _stops(requests, engine, stops)
        faults += _order(wanted, [one.key for one in engine])
        faults += _tokens(engine, trainer)
    return faults


def answer_faults(requests: Sequence[SampleRequest], engine: Sequence[Scored], weight_version: int) -> list[Fault]:
    """Of these faults those that an engine's answers alone show, whatever ended them."""
    wanted = [request.key for request in requests]
    return [*_of_side("engine", wanted, engine, weight_version)] or [*_order(wanted, [one.key for one in engine])]


def _of_side(side: Side, wanted: Sequence[SampleKey], scored: Sequence[Scored], weight_version: int) -> Iterator[Fault]:
    yield from _keys(side, wanted, [one.key for one in scored])
    yield from (fault for one in scored for fault in _whole(side, one, weight_version))


def _seeds(requests: Sequence[SampleRequest]) -> Iterator[Fault]:
    first: dict[int, SampleKey] = {}
    for request in requests:
        other = first.setdefault(request.seed, request.key)
        if other != request.key:
            yield Fault("equal seeds", request.key, f"it has the seed {request.seed} of {sample_name(other)}")


def _keys(side: Side, wanted: Sequence[SampleKey], found: Sequence[SampleKey]) -> Iterator[Fault]:
    counts = Counter(found)
    for key, count in counts.items():
        if count > 1:
            yield Fault("duplicated sample", key, f"the {side} answered it {count} times")
        if key not in set(wanted):
            yield Fault("foreign sample", key, f"the {side} answered it, and nobody asked for it")
    for key in wanted:
        if key not in counts:
            yield Fault("missing sample", key, f"the {side} did not answer it")


def _whole(side: Side, one: Scored, weight_version: int) -> Iterator[Fault]:
    if one.weight_version != weight_version:
        what = f"the {side} computed it with weight version {one.weight_version}, not {weight_version}"
        yield Fault("weight version", one.key, what)
    if len(one.log_probs) != len(one.tokens):
        what = f"the {side} has {len(one.log_probs)} log-probs for {len(one.tokens)} tokens"
        yield Fault("dropped token", one.key, what)


def _ends(requests: Sequence[SampleRequest], engine: Sequence[Scored]) -> Iterator[Fault]:
    """Responses that ended at their length, and are shorter: a token was lost together with its log-prob."""
    asked = {request.key: request.max_tokens for request in requests}
    for one in engine:
        if one.finish == "length" and len(one.tokens) != asked[one.key]:
            what = f"the engine ended it at its length of {asked[one.key]} tokens and returned {len(one.tokens)}"
            yield Fault("dropped token", one.key, what)


def _stops(requests: Sequence[SampleRequest], engine: Sequence[Scored], stops: frozenset[int]) -> Iterator[Fault]:
    """Responses that ended at a stop token and have none at their end, or that went on after one."""
    asked = {request.key: stops | set(request.stop_token_ids) for request in requests}
    for one in engine:
        places = [place for place, token in enumerate(one.tokens) if token in asked[one.key]]
        if one.finish == "stop" and not (one.tokens and one.tokens[-1] in asked[one.key]):
            yield Fault("dropped token", one.key, "the engine ended it at a stop token, and its last token is none")
        elif places and places[0] != len(one.tokens) - 1:
            what = f"token {places[0]} of {len(one.tokens)} is the stop token {one.tokens[places[0]]}"
            yield Fault("other tokens", one.key, f"{what}, and the response goes on")


def _order(wanted: Sequence[SampleKey], found: Sequence[SampleKey]) -> Iterator[Fault]:
    for place, (asked, came) in enumerate(zip(wanted, found, strict=True)):
        if asked != came:
            what = f"the engine answered it at place {place}, where {sample_name(asked)} was asked for"
            yield Fault("collection order", came, what)
            return


def _tokens(engine: Sequence[Scored], trainer: Sequence[Scored]) -> Iterator[Fault]:
    scored = {one.key: one.tokens for one in trainer}
    for one in engine:
        if (other := scored[one.key]) != one.tokens:
            shorter = "dropped token" if len(other) != len(one.tokens) else "other tokens"
            what = (
                f"the engine sampled {len(one.tokens)} tokens, the trainer scored {len(other)} of other ids or length"
            )
            yield Fault(shorter, one.key, what)
