"""The verdict *gradient*: is the backward pass the same bits twice, is its forward the scoring forward, is it right?

Pure: from what a trainer gave to a verdict. `vime_core.verify.gradient_live` collects it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Final

import numpy as np

from vime_core.types import Float32Array
from vime_core.verify.spread import spread
from vime_core.verify.taken import TOLERANCE, Taken, same_norm
from vime_core.verify.ulps import BitComparison, compare_bits
from vime_core.verify.verdict import Coverage, Verdict

NAME: Final = "gradient"
FACTOR: Final = 4.0
"""How much farther from fp64 than plain transformers in the same dtype a gradient may be."""
ROUNDING: Final[Mapping[str, float]] = {"bf16": 2.0**-8, "fp32": 2.0**-24}
"""Unit roundoff by training dtype: the relative error of rounding once."""
NOISE: Final = 0.5
"""A tensor whose bound is above this is not checked against fp64: in this dtype rounding drowns it."""


@dataclass(frozen=True)
class TensorError:
    """How far one gradient is from fp64: relative errors in the Euclidean norm.

    Args:
        name: HF name.
        elements: of the tensor.
        error: of the trainer.
        reference_error: of plain transformers, in the trainer's dtype, on the same sequences.
        typical: the median of that over all tensors.
        rounding: unit roundoff of that dtype.
    """

    name: str
    elements: int
    error: float
    reference_error: float
    typical: float
    rounding: float

    @property
    def bound(self) -> float:
        """``FACTOR x max(reference_error, typical, rounding)``.

        Two computations of one function in one dtype differ from it by independent roundings of the same size, so
        their errors are alike: over a model's tensors their ratio has a median near 1. For a single tensor it
        scatters, since a few large channels can carry a norm and either computation may round them well or badly:
        hence the median as the least, and the factor. A wrong or missing term changes a gradient by its own size.
        """
        return FACTOR * max(self.reference_error, self.typical, self.rounding)

    @property
    def noisy(self) -> bool:
        """Whether the bound is too wide to say anything."""
        return not self.bound <= NOISE

    @property
    def within(self) -> bool:
        """False for NaN."""
        return self.error <= self.bound


@dataclass(frozen=True)
class Backward:
    """One pass over all microbatches, forward and backward.

    Args:
        name: which pass, for the sentence.
        gradients: before clipping, a digest by tensor name; all passes have one kind of names.
        numbers: loss and gradient norm as hex.
        log_probs: of the forward that went with it, fp32 [R] a sequence, in one order for all passes; empty when the
            trainer does not show them.
        norm: of these gradients, in fp64; None when nobody computed it.
        taken: what the optimizer took of them, after clipping; empty where no optimizer ran or its state hides it.
    """

    name: str
    gradients: Mapping[str, str]
    numbers: Mapping[str, str]
    log_probs: tuple[Float32Array, ...] = ()
    norm: float | None = None
    taken: tuple[Taken, ...] = ()


@dataclass(frozen=True)
class GradientEvidence:
    """Everything that was collected.

    Args:
        dtype: training dtype.
        scored: log-probs of the scoring forward, fp32 [R] a sequence.
        passes: backward passes that must be the same, train steps first.
        errors: against fp64, by tensor.
        norm: Euclidean norm of all gradients in fp64.
        not_tried: why gradients were not compared with fp64; empty when they were.
        reference: the model that they were compared with, for the sentence.
        longest: tokens of the longest sequence.
    """

    dtype: str
    scored: tuple[Float32Array, ...]
    passes: tuple[Backward, ...]
    errors: tuple[TensorError, ...] = ()
    norm: float = 0.0
    not_tried: str = ""
    reference: str = "transformers"
    longest: int = 0


@dataclass(frozen=True)
class _Unequal:
    count: int
    first: str
    what: str


def gradient_verdict(evidence: GradientEvidence) -> Verdict:
    """The verdict on what was collected.

    Holds when every pass gives the same bits of loss, norm and each gradient, when the optimizer took these
    gradients, clipped, when the log-probs of every training forward have the bits of the scoring forward, none of
    them NaN, and when every gradient is within its bound of fp64 autograd; and when this could have shown a fault:
    gradients are not zero and log-probs vary.
    """
    verdict = _measured(evidence)
    unequal = _passes_differ(evidence.passes) or _steps_differ(evidence.passes) or _forwards_differ(evidence)
    if unequal:
        sentence = f"Gradient does not hold: {unequal.what}."
        return replace(verdict, holds=False, sentence=sentence, unequal=unequal.count, first=unequal.first)
    outside = [one for one in evidence.errors if not one.within and not (one.noisy and math.isfinite(one.error))]
    if outside:
        return _wrong(verdict, evidence, outside)
    idle = _idle(verdict, evidence)
    return _holds(verdict, evidence) if idle is None else idle


def _measured(evidence: GradientEvidence) -> Verdict:
    bits = [_compare(one.log_probs, evidence.scored) for one in evidence.passes if one.log_probs]
    nan = any(one.nan for one in bits)
    checked = [one for one in evidence.errors if not one.noisy]
    details = {
        "dtype": evidence.dtype,
        "passes": [one.name for one in evidence.passes],
        "taken": [{"pass": p.name, **asdict(one)} for p in evidence.passes for one in p.taken],
        "errors": [{**asdict(one), "bound": one.bound, "noisy": one.noisy} for one in evidence.errors],
        "checked_against_fp64": len(checked),
        "gradient_norm": evidence.norm,
        "not_tried": evidence.not_tried,
    }
    return Verdict(
        NAME,
        None,
        "",
        Coverage(
            samples=len(evidence.scored),
            tokens=sum(map(len, evidence.scored)),
            tensors=sum(len(one.gradients) for one in evidence.passes),
            longest=evidence.longest,
            log_probs=sum(one.compared for one in bits),
        ),
        largest_difference=math.nan if nan else max((one.largest_difference for one in bits), default=0.0),
        largest_ulps=max((one.largest_ulps for one in bits), default=0),
        entropy=spread(evidence.scored).entropy,
        details=details,
    )


def _passes_differ(passes: Sequence[Backward]) -> _Unequal | None:
    for number, later in enumerate(passes):
        earlier = passes[0]
        names = [*later.gradients, *(name for name in earlier.gradients if name not in later.gradients)]
        unequal = [name for name in names if earlier.gradients.get(name) != later.gradients.get(name)]
        if unequal:
            return _other_gradients(number, earlier, later, unequal, len(names))
        for name, value in later.numbers.items():
            if (other := earlier.numbers.get(name, value)) != value or math.isnan(float.fromhex(value)):
                what = f"the {name} is {other} in one pass ({earlier.name}) and {value} in another ({later.name})"
                return _Unequal(1, f"pass {number}, {name}", what)
    return None


def _other_gradients(number: int, a: Backward, b: Backward, unequal: Sequence[str], total: int) -> _Unequal:
    name = unequal[0]
    lacking = next((f", which {one.name} lacks" for one in (a, b) if name not in one.gradients), "")
    what = (
        f"two backward passes over the same microbatches ({a.name}; {b.name}) give other bits in {len(unequal)} of"
        f" {total} gradients, first {name!r}{lacking}"
    )
    return _Unequal(len(unequal), f"pass {number}, gradient {name!r}", what)


def _steps_differ(passes: Sequence[Backward]) -> _Unequal | None:
    """What a train step reports and what its optimizer took, against the gradients that it showed."""
    for number, one in enumerate(passes):
        if wrong := [taken for taken in one.taken if not taken.right]:
            what = (
                f"in {one.name} the optimizer took other gradients than the step showed and clipped, {len(wrong)} of"
                f" {len(one.taken)}: first {wrong[0]}"
            )
            return _Unequal(len(wrong), f"pass {number}, gradient {wrong[0].name!r} in the optimizer", what)
        told = float.fromhex(one.numbers.get("gradient norm", "nan"))
        if one.norm is not None and not same_norm(told, one.norm):
            what = f"the gradient norm of {one.name} is {told:.9g}, but its gradients have the norm {one.norm:.9g}"
            return _Unequal(1, f"pass {number}, gradient norm", what)
    return None


def _forwards_differ(evidence: GradientEvidence) -> _Unequal | None:
    for number, one in enumerate(evidence.passes):
        if not one.log_probs:
            continue
        lengths = [[len(row) for row in rows] for rows in (one.log_probs, evidence.scored)]
        if lengths[0] != lengths[1]:
            what = f"the training forward ({one.name}) gave log-probs of other lengths than the scoring forward"
            return _Unequal(1, f"pass {number}, lengths", what)
        bits = _compare(one.log_probs, evidence.scored)
        if bits.unequal:
            what = (
                f"the training forward ({one.name}) gives other bits than the scoring forward in {bits.unequal} of"
                f" {bits.compared} log-probs ({bits.nan} of them NaN), by at most {bits.largest_difference:.3g}"
                f" ({bits.largest_ulps} ulps)"
            )
            return _Unequal(bits.unequal, f"pass {number}, response token {bits.first}", what)
    return None


def _compare(a: Sequence[Float32Array], b: Sequence[Float32Array]) -> BitComparison:
    flat_a, flat_b = (np.concatenate([*rows, np.zeros(0, dtype=np.float32)]) for rows in (a, b))
    size = min(len(flat_a), len(flat_b))
    return compare_bits(flat_a[:size], flat_b[:size])


def _wrong(verdict: Verdict, evidence: GradientEvidence, outside: Sequence[TensorError]) -> Verdict:
    worst = max(outside, key=lambda one: one.error / one.bound if math.isfinite(one.error) else math.inf)
    sentence = (
        f"Gradient does not hold: {len(outside)} of {len(evidence.errors)} gradients are farther from fp64 autograd of"
        f" the reference than their bound; first {outside[0].name!r} ({_size(outside[0])}), worst {worst.name!r}"
        f" ({_size(worst)})."
    )
    return replace(verdict, holds=False, sentence=sentence, unequal=len(outside), first=f"gradient {outside[0].name!r}")


def _size(one: TensorError) -> str:
    return f"relative error {one.error:.3g}, bound {one.bound:.3g}"


def _idle(verdict: Verdict, evidence: GradientEvidence) -> Verdict | None:
    values = spread(evidence.scored)
    checked = [one for one in evidence.errors if not one.noisy]
    passes = [one for one in evidence.passes if one.gradients]
    if not values.deviation and not verdict.coverage.tokens:
        return _because(verdict, "no token was scored", "tokens")
    if len(passes) < 2 or not any(one.log_probs for one in passes):
        return _because(verdict, "the backward was not done twice, or shows no log-probs of its forward", "passes")
    if values.near_constant:
        why = f"the log-probs hardly vary (standard deviation {values.deviation:.2g} nats)"
        return _because(verdict, f"{why}, so a fault could not show in them", "log-probs")
    if evidence.not_tried or not checked:
        why = evidence.not_tried or "rounding drowns every gradient"
        return _because(verdict, f"the backward repeats, but it was not compared with fp64: {why}", "reference")
    if not evidence.norm > 0:
        return _because(verdict, f"the norm of all gradients is {evidence.norm:g}", "gradients")
    if unseen := [one.name for one in evidence.passes if one.log_probs and not one.taken]:
        why = "the optimizer's state shows no first moment (NAME.exp_avg), so it is unknown which gradients it took"
        return _because(verdict, f"{why} in {unseen[0]}", "optimizer")
    return None


def _because(verdict: Verdict, why: str, first: str) -> Verdict:
    return replace(verdict, sentence=f"Gradient could not be checked: {why}.", first=first)


def _holds(verdict: Verdict, evidence: GradientEvidence) -> Verdict:
    checked = [one for one in evidence.errors if not one.noisy]
    worst = max(checked, key=lambda one: one.error / one.bound)
    noisy = len(evidence.errors) - len(checked)
    left = f" ({noisy} more drown in the rounding of {evidence.dtype})" if noisy else ""
    covered, steps = verdict.coverage, [one for one in evidence.passes if one.taken]
    sentence = (
        f"Gradient holds: {len(evidence.passes)} backward passes, {len(steps)} of them train steps, gave the same bits"
        f" ({covered.tensors} gradients before clipping), the optimizer took them, clipped"
        f" ({sum(len(one.taken) for one in steps)} tensors within a relative error of {TOLERANCE:g}), the training"
        f" forward has the scoring forward's bits ({covered.samples} sequences of up to {covered.longest} tokens,"
        f" {covered.tokens} of them scored), and"
        f" {len(checked)} gradients are within their bound of fp64 autograd of {evidence.reference}{left}:"
        f" worst {worst.name!r}, {_size(worst)}, from the error of {evidence.reference} in {evidence.dtype}; entropy"
        f" {verdict.entropy:.3f} nats a token."
    )
    return replace(verdict, holds=True, sentence=sentence)
