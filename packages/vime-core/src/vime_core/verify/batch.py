"""The verdict *batch*: is a response the same bits whatever else the engine does?

Pure: from answers to a verdict. `vime_core.verify.batch_live` collects them from a live engine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

import numpy as np

from vime_core.types import Float32Array, SampleKey
from vime_core.verify.difference import distance
from vime_core.verify.matching import sample_name
from vime_core.verify.spread import spread
from vime_core.verify.ulps import compare_bits
from vime_core.verify.verdict import Coverage, Verdict

NAME: Final = "batch"
Circumstance = Literal[
    "alone again",
    "in company",
    "in another order",
    "after a prefix-cache hit",
    "in chunks",
    "re-scored as prefill",
]
CIRCUMSTANCES: Final[tuple[Circumstance, ...]] = (
    "alone again",
    "in company",
    "in another order",
    "after a prefix-cache hit",
    "in chunks",
    "re-scored as prefill",
)


@dataclass(frozen=True)
class Answer:
    """Response tokens and their log-probs, fp32 [R]."""

    tokens: tuple[int, ...]
    log_probs: Float32Array


@dataclass(frozen=True)
class Trial:
    """One request under one circumstance against the same request alone.

    Args:
        circumstance: what was different.
        key: of the request.
        prompt_length: tokens of its prompt.
        temperature: of its sampling; 0 is greedy.
        alone: the answer of the engine that had nothing else to do.
        answer: under the circumstance.
    """

    circumstance: Circumstance
    key: SampleKey
    prompt_length: int
    temperature: float
    alone: Answer
    answer: Answer

    @property
    def what(self) -> str:
        """The request in words."""
        sampling = f"at temperature {self.temperature:g}" if self.temperature else "greedily"
        return f"the {self.prompt_length}-token prompt of {sample_name(self.key)}, sampled {sampling},"


@dataclass(frozen=True)
class AnswerComparison:
    """Place by place; everything after the first other token counts as unequal.

    ``first_ulps`` and the largest values are of places with equal tokens; ``first_ulps`` is None elsewhere.
    """

    compared: int
    unequal: int
    first: int | None
    other_token: bool
    first_ulps: int | None
    largest_ulps: int
    largest_difference: float


def compare_answers(alone: Answer, answer: Answer) -> AnswerComparison:
    """Tokens and bits of log-probs of two answers to one request."""
    length = max(len(alone.tokens), len(answer.tokens))
    shared = min(len(alone.tokens), len(answer.tokens))
    pairs = zip(alone.tokens[:shared], answer.tokens[:shared], strict=True)
    equal = next((i for i, (a, b) in enumerate(pairs) if a != b), shared)
    usable = min(equal, len(alone.log_probs), len(answer.log_probs))
    bits = compare_bits(alone.log_probs[:usable], answer.log_probs[:usable])
    first = bits.first if bits.first is not None else (usable if usable < length else None)
    return AnswerComparison(
        compared=length,
        unequal=bits.unequal + length - usable,
        first=first,
        other_token=bits.first is None and first is not None,
        first_ulps=bits.first_ulps,
        largest_ulps=bits.largest_ulps,
        largest_difference=bits.largest_difference,
    )


@dataclass(frozen=True)
class Breaking:
    """The smallest company found in which a request gets another answer: prompt lengths, in order of admission.

    ``minimal`` says that leaving out any one of them was tried, and then the answer is that of the request alone.
    """

    lengths: tuple[int, ...]
    trials: int
    minimal: bool

    def __str__(self) -> str:
        others = "another prompt" if len(self.lengths) == 1 else f"{len(self.lengths)} other prompts"
        shown = ", ".join(map(str, self.lengths[:8])) + (", ..." if len(self.lengths) > 8 else "")
        least = "the smallest company that breaks it" if self.minimal else "the smallest company found that breaks it"
        return f"{least} is {others} of {shown} tokens"


@dataclass(frozen=True)
class Collected:
    """Everything that was tried. ``not_tried`` says why, by circumstance; such a verdict cannot hold.

    ``never_happens`` are circumstances that this engine's settings rule out altogether, which is no gap.
    """

    trials: tuple[Trial, ...]
    not_tried: Mapping[Circumstance, str] = field(default_factory=dict[Circumstance, str])
    never_happens: Mapping[Circumstance, str] = field(default_factory=dict[Circumstance, str])
    breaking: Breaking | None = None


def batch_verdict(collected: Collected) -> Verdict:
    """The verdict on what was collected.

    Holds when a request gets the same tokens with the same bits of log-prob under every circumstance of
    `CIRCUMSTANCES` as alone, none of them NaN, and the log-probs vary enough for a fault to show.
    """
    compared = [(trial, compare_answers(trial.alone, trial.answer)) for trial in collected.trials]
    evidence = _evidence(collected, compared)
    unequal = [(trial, comparison) for trial, comparison in compared if comparison.unequal]
    if unequal:
        return _fails(evidence, collected, unequal)
    idle = _idle(evidence, collected)
    return _holds(evidence, collected) if idle is None else idle


def _evidence(collected: Collected, compared: Sequence[tuple[Trial, AnswerComparison]]) -> Verdict:
    """A verdict without an outcome that already holds everything that was measured."""
    nan = any(math.isnan(one.largest_difference) for _, one in compared)
    breaking = collected.breaking
    details = {
        "circumstances": {name: _summary(name, compared) for name in CIRCUMSTANCES},
        "not_tried": dict(collected.not_tried),
        "never_happens": dict(collected.never_happens),
        "smallest_company": None if breaking is None else list(breaking.lengths),
    }
    return Verdict(
        NAME,
        None,
        "",
        Coverage(
            samples=len(compared),
            tokens=sum(one.compared for _, one in compared),
            longest=max((t.prompt_length + len(t.alone.tokens) for t in collected.trials if t.alone.tokens), default=0),
            log_probs=sum(one.compared for _, one in compared),
        ),
        unequal=sum(one.unequal for _, one in compared),
        largest_difference=math.nan if nan else max((one.largest_difference for _, one in compared), default=0.0),
        largest_ulps=max((one.largest_ulps for _, one in compared), default=0),
        entropy=spread([trial.alone.log_probs for trial, _ in compared]).entropy,
        details=details,
    )


def _summary(name: Circumstance, compared: Sequence[tuple[Trial, AnswerComparison]]) -> dict[str, int]:
    chosen = [one for trial, one in compared if trial.circumstance == name]
    tokens, unequal = (sum(getattr(one, field) for one in chosen) for field in ("compared", "unequal"))
    return {"trials": len(chosen), "tokens": tokens, "unequal": unequal}


def _fails(evidence: Verdict, collected: Collected, unequal: Sequence[tuple[Trial, AnswerComparison]]) -> Verdict:
    trial, comparison = unequal[0]
    kinds = list(dict.fromkeys(one.circumstance for one, _ in unequal))
    token = f"token {comparison.first}"
    first = f"{trial.circumstance}, {sample_name(trial.key)}, {token}"
    size = (
        f"{evidence.unequal} of {evidence.coverage.tokens} tokens differ in {len(unequal)} of {len(collected.trials)}"
    )
    company = f"; {collected.breaking}" if collected.breaking else ""
    sentence = (
        f"Batch does not hold: {trial.what} gets another answer {trial.circumstance} than alone from {token} on:"
        f" {_two_answers(trial, comparison)}{company}; {size} trials ({', '.join(kinds)}), where tokens are equal by at"
        f" most {evidence.largest_difference:.3g} nats ({evidence.largest_ulps} ulps)."
    )
    return replace(evidence, holds=False, sentence=sentence, first=first)


def _two_answers(trial: Trial, comparison: AnswerComparison) -> str:
    assert comparison.first is not None
    if not comparison.other_token:
        alone, other = (str(np.float32(a.log_probs[comparison.first])) for a in (trial.alone, trial.answer))
        return f"log-prob {alone} alone and {other}, {distance(comparison.first_ulps)}"
    ids = [
        a.tokens[comparison.first] if comparison.first < len(a.tokens) else None for a in (trial.alone, trial.answer)
    ]
    if None in ids or ids[0] == ids[1]:
        lengths = [f"{len(a.tokens)} tokens with {len(a.log_probs)} log-probs" for a in (trial.alone, trial.answer)]
        return " and ".join(lengths)
    return f"token {ids[0]} alone and {ids[1]}"


def _idle(evidence: Verdict, collected: Collected) -> Verdict | None:
    """The verdict when equality would mean nothing or not everything was tried; None when it means something."""
    values = spread([trial.alone.log_probs for trial in collected.trials])
    if not evidence.coverage.tokens:
        return _because(evidence, "no sampled token was compared", "tokens")
    if values.near_constant:
        why = (
            f"the log-probs hardly vary (standard deviation {values.deviation:.2g} nats around an entropy of"
            f" {values.entropy:.3f}), so a fault could not show in them"
        )
        return _because(evidence, why, "log-probs")
    tried = {trial.circumstance for trial in collected.trials if trial.alone.tokens} | set(collected.never_happens)
    lacking: list[Circumstance] = [name for name in CIRCUMSTANCES if name not in tried]
    if lacking:
        reasons = "; ".join(f"{name} ({collected.not_tried.get(name, 'nothing was compared')})" for name in lacking)
        return _because(evidence, f"what was tried is equal, but this was not tried: {reasons}", lacking[0])
    return None


def _because(evidence: Verdict, why: str, first: str) -> Verdict:
    return replace(evidence, sentence=f"Batch could not be checked: {why}.", first=first)


def _holds(evidence: Verdict, collected: Collected) -> Verdict:
    tried = [name for name in CIRCUMSTANCES if name not in collected.never_happens]
    never = "".join(f"; {name} never happens here: {why}" for name, why in collected.never_happens.items())
    sentence = (
        f"Batch holds: every request got the bits that it gets alone: {', '.join(tried)}"
        f" ({evidence.coverage.samples} trials, {evidence.coverage.tokens} tokens, up to position"
        f" {evidence.coverage.longest - 1}, 0 unequal); what was sampled from"
        f" had {evidence.entropy:.3f} nats of entropy a token{never}."
    )
    return replace(evidence, holds=True, sentence=sentence)
