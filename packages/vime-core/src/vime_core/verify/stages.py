"""Walks two steps in the order in which a step computes, to the first result that differs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from vime_core.record.reader import RunRecord, StepSamples
from vime_core.record.schema import StepEntry, UpdateEntry
from vime_core.types import Float32Array, Sample, SampleKey
from vime_core.verify.causes import Cause
from vime_core.verify.difference import Found, Place, Size, Stage, distance
from vime_core.verify.ulps import compare_bits, compare_numbers

_Find = Callable[["StepPair"], Found | None]


@dataclass(frozen=True)
class StepPair:
    """The same step of two records; samples are read when a digest differs."""

    record_a: RunRecord
    record_b: RunRecord
    entry_a: StepEntry
    entry_b: StepEntry

    @cached_property
    def samples_a(self) -> StepSamples:
        return self.record_a.step_samples(self.step)

    @cached_property
    def samples_b(self) -> StepSamples:
        return self.record_b.step_samples(self.step)

    @property
    def step(self) -> int:
        return self.entry_a.step

    @property
    def matched(self) -> Iterator[tuple[Sample, Sample]]:
        return zip(self.samples_a.samples, self.samples_b.samples, strict=True)

    @property
    def keys(self) -> list[SampleKey]:
        return [sample.key for sample in self.samples_a.samples]


@dataclass(frozen=True)
class EvaluationPair(StepPair):
    """The evaluation before a step of two records: its responses in the place of the step's samples."""

    @cached_property
    def samples_a(self) -> StepSamples:
        return _evaluated(self.record_a, self.step)

    @cached_property
    def samples_b(self) -> StepSamples:
        return _evaluated(self.record_b, self.step)


def _evaluated(record: RunRecord, step: int) -> StepSamples:
    return StepSamples(record.evaluation_samples(step), np.zeros(0, dtype=np.float32), (), ())


def first_unequal(pair: StepPair) -> Found | None:
    """The first unequal result of a step, or None when every digest of it is equal."""
    for find in (_evaluation, _prompts, _tokens, _rollout_log_probs, _rewards, _reference, _advantages, _updates):
        if found := find(pair):
            return found
    return _state(pair) or _metrics(pair)


def unequal_tensors(
    place: Place, cause: Cause, a: Mapping[str, str], b: Mapping[str, str], root_a: str, root_b: str
) -> Found | None:
    """The first tensor, in the tensors' order, whose digest differs or that one side lacks."""
    names = [*a, *(name for name in b if name not in a)]
    unequal = [name for name in names if a.get(name) != b.get(name)]
    if unequal:
        name = unequal[0]
        what = (
            f"its digests are {_short(a[name])} and {_short(b[name])}"
            if name in a and name in b
            else _lacking(name in a)
        )
        return Found(_at(place, tensor=name), what, Size(len(unequal), len(names), "tensors"), cause)
    if root_a != root_b:
        what = "the tensors stand in another order" if list(a) != list(b) else "the roots differ, the digests don't"
        return Found(place, what, Size(1, 1, "roots"), "record")
    return None


def _evaluation(pair: StepPair) -> Found | None:
    return _evaluation_responses(pair) or _evaluation_metrics(pair)


def _evaluation_responses(pair: StepPair) -> Found | None:
    """The stages of the evaluation's responses, as those of a step."""
    sides = [entry.evaluation for entry in (pair.entry_a, pair.entry_b)]
    if sides[0] == sides[1]:
        return None
    if not all(sides):
        place, size = Place("evaluation", pair.step), Size(1, 1, "evaluations")
        return Found(place, _lacking(bool(sides[0])), size, "minibatches")
    evaluated = EvaluationPair(
        pair.record_a,
        pair.record_b,
        *(e.model_copy(update=dict(e.evaluation)) for e in (pair.entry_a, pair.entry_b)),
    )
    for find in (_prompts, _tokens, _rollout_log_probs, _rewards):
        if found := find(evaluated):
            what = f"{found.place.stage}: {found.what}"
            return replace(found, place=_at(found.place, stage="evaluation"), what=what)
    return _contradiction(pair, "evaluation")


def _evaluation_metrics(pair: StepPair) -> Found | None:
    return _unequal_metrics(pair, "evaluation", "engine", "evaluation/")


def _metrics(pair: StepPair) -> Found | None:
    """What the record's arrays do not decide: a loss's own means, factors of a correction, counts of the data."""
    return _unequal_metrics(pair, "metrics", "metrics", "")


def _unequal_metrics(pair: StepPair, stage: Stage, cause: Cause, prefix: str) -> Found | None:
    a, b = (
        {name: value for name, value in entry.metrics.items() if name.startswith(prefix)}
        for entry in (pair.entry_a, pair.entry_b)
    )
    unequal = sorted(name for name in {*a, *b} if a.get(name) != b.get(name))
    if not unequal:
        return None
    name = unequal[0]
    what = f"{name} is {a.get(name)} and {b.get(name)}"
    return Found(Place(stage, pair.step), what, Size(len(unequal), len({*a, *b}), "values"), cause)


def _prompts(pair: StepPair) -> Found | None:
    if pair.entry_a.prompts == pair.entry_b.prompts:
        return None
    if missing := _unmatched(pair):
        return missing
    causes: dict[str, Cause] = {"dataset_index": "data order", "prompt_tokens": "data order", "seed": "seed"}
    return _field_difference(pair, "prompts", causes) or _contradiction(pair, "prompts")


def _tokens(pair: StepPair) -> Found | None:
    if pair.entry_a.tokens == pair.entry_b.tokens:
        return None
    unequal = [(a, b) for a, b in pair.matched if a.response_tokens != b.response_tokens]
    if unequal:
        return _token_difference(pair, *unequal[0], Size(len(unequal), len(pair.keys), "responses"))
    causes: dict[str, Cause] = {
        "weight_version": "weight version",
        "finish_reason": "engine",
        "loss_mask": "minibatches",
        "response_text": "detokenizer",
        "kept": "engine",
    }
    return _field_difference(pair, "tokens", causes) or _contradiction(pair, "tokens")


def _token_difference(pair: StepPair, a: Sample, b: Sample, size: Size) -> Found:
    shared = min(len(a.response_tokens), len(b.response_tokens))
    token = next((t for t in range(shared) if a.response_tokens[t] != b.response_tokens[t]), shared)
    ids = [str(s.response_tokens[token]) if token < len(s.response_tokens) else "the end" for s in (a, b)]
    before = compare_bits(a.rollout_log_probs[:token], b.rollout_log_probs[:token])
    cause: Cause = "engine" if before.unequal else "draw"
    if token == 0:
        history = "it is the response's first token"
    elif before.unequal:
        history = (
            f"the log-probs before it differ already, from token {before.first} on ({distance(before.first_ulps)})"
        )
    else:
        history = f"the log-probs of the {token} tokens before it are equal"
    if a.weight_version != b.weight_version:
        cause, history = "weight version", f"weight versions are {a.weight_version} and {b.weight_version}"
    what = f"the ids are {ids[0]} and {ids[1]}, {history}"
    return Found(Place("tokens", pair.step, sample=a.key, token=token), what, size, cause)


def _rollout_log_probs(pair: StepPair) -> Found | None:
    if pair.entry_a.rollout_log_probs == pair.entry_b.rollout_log_probs:
        return None
    place = Place("rollout log-probs", pair.step)
    a, b = ([s.rollout_log_probs for s in side.samples] for side in (pair.samples_a, pair.samples_b))
    return _log_probs(place, "engine", pair.keys, a, b) or _contradiction(pair, "rollout log-probs")


def _rewards(pair: StepPair) -> Found | None:
    if pair.entry_a.rewards == pair.entry_b.rewards:
        return None
    a, b = (np.array([s.reward for s in side.samples]) for side in (pair.samples_a, pair.samples_b))
    return _per_sample(Place("rewards", pair.step), "reward", pair.keys, a, b) or _contradiction(pair, "rewards")


def _reference(pair: StepPair) -> Found | None:
    if pair.entry_a.reference_log_probs == pair.entry_b.reference_log_probs:
        return None
    place = Place("reference log-probs", pair.step)
    a, b = (list(side.reference_log_probs) for side in (pair.samples_a, pair.samples_b))
    if bool(a) != bool(b):
        return Found(place, "one run has no reference model", Size(1, 1, "stages"), "config")
    return _log_probs(place, "trainer forward", pair.keys, a, b) or _contradiction(pair, "reference log-probs")


def _advantages(pair: StepPair) -> Found | None:
    if pair.entry_a.advantages == pair.entry_b.advantages:
        return None
    place = Place("advantages", pair.step)
    found = _per_sample(place, "advantage", pair.keys, pair.samples_a.advantages, pair.samples_b.advantages)
    return found or _contradiction(pair, "advantages")


def _updates(pair: StepPair) -> Found | None:
    counts = [len(entry.updates) for entry in (pair.entry_a, pair.entry_b)]
    for number, (a, b) in enumerate(zip(pair.entry_a.updates, pair.entry_b.updates, strict=False)):
        if found := _update(pair, number, a, b):
            return found
    if counts[0] != counts[1]:
        what = f"there are {counts[0]} and {counts[1]} of them"
        return Found(Place("updates", pair.step), what, Size(1, 1, "counts"), "minibatches")
    return None


def _update(pair: StepPair, number: int, a: UpdateEntry, b: UpdateEntry) -> Found | None:
    def place(stage: Stage) -> Place:
        return Place(stage, pair.step, number)

    return (
        _train_log_probs(pair, number, a, b)
        or _number(place("loss"), "loss", a.loss, b.loss)
        or unequal_tensors(place("gradients"), "backward", a.gradients, b.gradients, a.gradients_root, b.gradients_root)
        or _number(place("gradient norm"), "norm", a.grad_norm, b.grad_norm)
        or _number(place("learning rate"), "schedule", a.learning_rate, b.learning_rate)
    )


def _train_log_probs(pair: StepPair, number: int, a: UpdateEntry, b: UpdateEntry) -> Found | None:
    if a.train_log_probs == b.train_log_probs:
        return None
    place = Place("train log-probs", pair.step, number)
    chosen = [i for i, update in enumerate(pair.samples_a.updates) if update == number]
    if chosen != [i for i, update in enumerate(pair.samples_b.updates) if update == number]:
        return Found(place, "this update trained on other samples", Size(1, 1, "updates"), "minibatches")
    rows_a, rows_b = ([side.train_log_probs[i] for i in chosen] for side in (pair.samples_a, pair.samples_b))
    found = _log_probs(place, "trainer forward", [pair.keys[i] for i in chosen], rows_a, rows_b)
    return found or _contradiction(pair, "train log-probs")


def _state(pair: StepPair) -> Found | None:
    a, b = pair.entry_a, pair.entry_b
    optimizer = unequal_tensors(
        Place("optimizer state", pair.step), "optimizer", a.optimizer, b.optimizer, a.optimizer_root, b.optimizer_root
    )
    cause: Cause = "optimizer" if optimizer else "after optimizer"
    place = Place("weights", pair.step)
    return unequal_tensors(place, cause, a.weights, b.weights, a.weights_root, b.weights_root) or optimizer


def _log_probs(
    place: Place, cause: Cause, keys: Sequence[SampleKey], a: Sequence[Float32Array], b: Sequence[Float32Array]
) -> Found | None:
    for key, row_a, row_b in zip(keys, a, b, strict=True):
        if len(row_a) != len(row_b):
            what = f"there are {len(row_a)} and {len(row_b)} values"
            return Found(_at(place, sample=key), what, Size(1, len(keys), "samples"), "record")
    flat_a, flat_b = (np.concatenate([*rows, np.zeros(0, dtype=np.float32)]) for rows in (a, b))
    size, first = _float_size(flat_a, flat_b, "tokens")
    if first is None:
        return None
    ends = np.cumsum([len(row) for row in a])
    sample = int(np.searchsorted(ends, first, side="right"))
    token = first - int(ends[sample]) + len(a[sample])
    what = _two_values(flat_a[first], flat_b[first], size)
    return Found(_at(place, sample=keys[sample], token=token), what, size, cause)


def _per_sample(
    place: Place, cause: Cause, keys: Sequence[SampleKey], a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]
) -> Found | None:
    size, first = _float_size(a, b, "samples")
    if first is None:
        return None
    return Found(_at(place, sample=keys[first]), _two_values(a[first], b[first], size), size, cause)


def _number(place: Place, cause: Cause, a: str, b: str) -> Found | None:
    if a == b:
        return None
    x, y = float.fromhex(a), float.fromhex(b)
    compared = compare_numbers(x, y)
    size = Size(1, 1, "numbers", compared.first_ulps, compared.largest_ulps, compared.largest_difference)
    return Found(place, _two_values(x, y, size), size, cause)


def _float_size(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any], unit: str) -> tuple[Size, int | None]:
    compared = compare_bits(a, b)
    size = Size(
        compared.unequal,
        compared.compared,
        unit,
        compared.first_ulps,
        compared.largest_ulps,
        compared.largest_difference,
    )
    return size, compared.first


def _two_values(a: Any, b: Any, size: Size) -> str:
    """Both in the fewest digits that tell them from their neighbours."""
    return f"{a!s} and {b!s}, {distance(size.first_ulps)}"


def _field_difference(pair: StepPair, stage: Stage, causes: Mapping[str, Cause]) -> Found | None:
    unequal = [
        (a, next(name for name in causes if getattr(a, name) != getattr(b, name)), b)
        for a, b in pair.matched
        if any(getattr(a, name) != getattr(b, name) for name in causes)
    ]
    if not unequal:
        return None
    a, name, b = unequal[0]
    what = f"{name} is {_shortened(getattr(a, name))} and {_shortened(getattr(b, name))}"
    size = Size(len(unequal), len(pair.keys), "samples")
    return Found(Place(stage, pair.step, sample=a.key), what, size, causes[name])


def _unmatched(pair: StepPair) -> Found | None:
    a, b = ({sample.key for sample in side.samples} for side in (pair.samples_a, pair.samples_b))
    alone = sorted(a ^ b)
    if not alone:
        return None
    size = Size(len(alone), len(a | b), "samples")
    return Found(Place("prompts", pair.step, sample=alone[0]), _lacking(alone[0] in a), size, "data order")


def _contradiction(pair: StepPair, stage: Stage) -> Found:
    what = "the digests differ, the stored samples don't"
    return Found(Place(stage, pair.step), what, Size(1, 1, "digests"), "record")


def _lacking(in_first: bool) -> str:
    return f"only the {'first' if in_first else 'second'} record has it"


def _at(place: Place, **more: Any) -> Place:
    return Place(**{**vars(place), **more})


def _short(digest: str) -> str:
    return digest[:16]


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
