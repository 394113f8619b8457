"""The verdict *repeat*: the same run twice, the same bits?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from vime_core.record.reader import RunRecord, StepSamples
from vime_core.record.schema import Digests, StepEntry
from vime_core.types import Float32Array
from vime_core.verify.diff import config_differences, diff_records, one_run
from vime_core.verify.difference import Difference, Size
from vime_core.verify.spread import Spread, spread
from vime_core.verify.verdict import Coverage, Verdict

NAME: Final = "repeat"


@dataclass(frozen=True)
class _Evidence:
    """What one record holds: what it covers, how its log-probs vary, where it first holds NaN or lacks digests."""

    coverage: Coverage
    spread: Spread
    nan: str
    lacking: str


def verify_repeat(a: RunRecord, b: RunRecord) -> Verdict:
    """Compare two records of one configuration in every digest of every step.

    Holds when both are complete and sound, nothing differs, nothing is NaN, and the evidence could have shown a
    fault: tokens were sampled, log-probs vary, and training changed weights (unless every learning rate was 0).

    Raises:
        RecordError: a record is damaged beyond reading.
    """
    return next(verdict for verdict in _in_order(a, b) if verdict is not None)


def _in_order(a: RunRecord, b: RunRecord) -> Iterator[Verdict | None]:
    """One question after the other; the first that is answered by a verdict ends it."""
    yield _unsound(a, "first")
    yield _unsound(b, "second")
    yield _incomparable(a, b)
    evidence = _evidence(a)
    yield _differs(diff_records(a, b), evidence)
    yield _nan(evidence)
    yield _idle(a, evidence)
    yield _holds(a, evidence)


def _unsound(record: RunRecord, which: str) -> Verdict | None:
    findings = record.check().findings
    if not findings:
        return None
    places = "place" if len(findings) == 1 else "places"
    return Verdict(
        NAME,
        False,
        f"Repeat does not hold: the {which} record ({record.directory}) contradicts itself in {len(findings)} {places},"
        f" first: {findings[0]}.",
        unequal=len(findings),
        first=f"{which} record, {findings[0]}",
    )


def _incomparable(a: RunRecord, b: RunRecord) -> Verdict | None:
    config = config_differences(a, b)
    if config:
        more = f" and {len(config) - 3} more" if len(config) > 3 else ""
        return _unchecked(f"the configurations differ: {', '.join(config[:3])}{more}", f"config, {next(iter(config))}")
    if same := one_run(a, b):
        return _unchecked(same, "run_id")
    for which, record in (("first", a), ("second", b)):
        if record.manifest.status != "complete":
            error = f" ({record.manifest.error})" if record.manifest.error else ""
            return _unchecked(f"the {which} run is {record.manifest.status!r}{error}", f"status of the {which} record")
        if lacking := _lacks(record):
            return _unchecked(f"the {which} record holds {lacking}", f"steps of the {which} record")
    if bool(a.manifest.initial_weights) != bool(b.manifest.initial_weights):
        return _unchecked("one record lacks the digests of the initial weights", "initial weights")
    return None


def _lacks(record: RunRecord) -> str:
    if not any(len(sample.response_tokens) for entry in record.steps for sample in record.samples(entry.step)):
        return "no sampled token"
    return ""


def _unchecked(why: str, first: str) -> Verdict:
    return Verdict(NAME, None, f"Repeat could not be checked: {why}.", first=first)


def _evidence(record: RunRecord) -> _Evidence:
    log_probs: list[Float32Array] = []
    nan: list[str] = []
    lacking: list[str] = []
    tensors = len(record.manifest.initial_weights)
    others = 0
    for entry in record.steps:
        step = record.step_samples(entry.step)
        evaluated = record.evaluation_samples(entry.step) if entry.evaluation else []
        log_probs += [sample.rollout_log_probs for sample in (*step.samples, *evaluated)]
        others += sum(map(len, (*step.train_log_probs, *step.reference_log_probs)))
        nan += [f"step {entry.step}, evaluation" for sample in evaluated if np.isnan(sample.rollout_log_probs).any()]
        nan += [f"step {entry.step}, {name}" for name, values in _floats(entry, step) if np.isnan(values).any()]
        lacking += [f"step {entry.step}, {name}" for name, leaves in _leaves(entry) if not leaves]
        tensors += sum(len(leaves) for _, leaves in _leaves(entry))
    tokens = sum(map(len, log_probs))
    coverage = Coverage(len(record.steps), len(log_probs), tokens, tensors, log_probs=tokens + others)
    return _Evidence(coverage, spread(log_probs), next(iter(nan), ""), next(iter(lacking), ""))


def _leaves(entry: StepEntry) -> Iterator[tuple[str, Digests]]:
    for number, update in enumerate(entry.updates):
        yield f"gradients of update {number}", update.gradients
    if not entry.updates:
        yield "gradients", {}
    yield "weights", entry.weights
    yield "optimizer state", entry.optimizer


def _floats(entry: StepEntry, step: StepSamples) -> Iterator[tuple[str, NDArray[Any]]]:
    none = np.zeros(0, dtype=np.float32)
    yield "rollout log-probs", np.concatenate([*(sample.rollout_log_probs for sample in step.samples), none])
    yield "rewards", np.array([sample.reward for sample in step.samples])
    yield "reference log-probs", np.concatenate([*step.reference_log_probs, none])
    yield "advantages", step.advantages
    yield "train log-probs", np.concatenate([*step.train_log_probs, none])
    for name in ("loss", "grad_norm", "learning_rate"):
        yield name, np.array([float.fromhex(getattr(update, name)) for update in entry.updates])
    for name, value in entry.metrics.items():
        yield f"metric {name}", np.array([float.fromhex(value)])


def _differs(difference: Difference | None, evidence: _Evidence) -> Verdict | None:
    if difference is None:
        return None
    size = difference.found.size if difference.found else Size(0, 0, "results")
    return Verdict(
        NAME,
        False,
        f"Repeat does not hold. {difference.sentence}",
        coverage=evidence.coverage,
        unequal=size.unequal,
        largest_difference=size.largest_difference or 0.0,
        largest_ulps=size.largest_ulps or 0,
        first=str(difference.place),
        entropy=evidence.spread.entropy,
    )


def _nan(evidence: _Evidence) -> Verdict | None:
    if not evidence.nan:
        return None
    return Verdict(
        NAME,
        False,
        f"Repeat does not hold: {evidence.nan} holds NaN, which equals nothing, itself included.",
        coverage=evidence.coverage,
        unequal=1,
        largest_difference=math.nan,
        first=evidence.nan,
    )


def _idle(record: RunRecord, evidence: _Evidence) -> Verdict | None:
    """The verdict when equality would mean nothing; None when it means something."""
    values = evidence.spread
    idle = Verdict(NAME, None, "", coverage=evidence.coverage, entropy=values.entropy, changed=_changed(record))
    if evidence.lacking:
        return _because(idle, f"{evidence.lacking}, were not digested", evidence.lacking)
    if values.near_constant:
        why = (
            f"the log-probs hardly vary (standard deviation {values.deviation:.2g} nats around an entropy of"
            f" {values.entropy:.3f}), so a fault could not show in them"
        )
        return _because(idle, why, "log-probs")
    if not idle.changed and not _rate_is_zero(record):
        unknown = "the weights before training were not digested, so it is unknown whether training changed them"
        none = "training changed no weight, so its steps prove nothing"
        return _because(idle, unknown if idle.changed is None else none, "weights")
    return None


def _because(idle: Verdict, why: str, first: str) -> Verdict:
    return replace(idle, sentence=f"Repeat could not be checked: {why}.", first=first)


def _changed(record: RunRecord) -> float | None:
    """Share of weight tensors whose digest differs between start and end; None when that was not recorded."""
    states = [s for s in (record.manifest.initial_weights, *(entry.weights for entry in record.steps)) if s]
    if len(states) < 2:
        return None
    first, last = states[0], states[-1]
    return sum(first.get(name) != digest for name, digest in last.items()) / len(last)


def _rate_is_zero(record: RunRecord) -> bool:
    rates = [float.fromhex(update.learning_rate) for entry in record.steps for update in entry.updates]
    return bool(rates) and not any(rates)


def _holds(record: RunRecord, evidence: _Evidence) -> Verdict:
    covered, changed, entropy = evidence.coverage, _changed(record), evidence.spread.entropy
    trained = f"training changed {changed:.0%} of the weight tensors" if changed else "the learning rate is 0"
    return Verdict(
        NAME,
        True,
        f"Repeat holds: both runs gave the same bits in all {covered.steps} steps ({covered.samples} samples,"
        f" {covered.tokens} sampled tokens, {covered.tensors} tensor digests; 0 unequal); {trained}, and the sampled"
        f" distributions had {entropy:.3f} nats of entropy a token.",
        coverage=covered,
        entropy=entropy,
        changed=changed,
    )
