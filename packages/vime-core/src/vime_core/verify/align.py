"""The verdict *align*: is the trainer's log-prob of every sampled token the engine's, bit for bit?

Pure: from what both sides said to a verdict. `vime_core.verify.align_live` collects it from a live trainer and engine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Final

import numpy as np

from vime_core.types import Drawn, Float32Array, SampleKey, SampleRequest
from vime_core.verify.difference import distance
from vime_core.verify.draws import DrawComparison, compare_draws
from vime_core.verify.layers import TapComparison
from vime_core.verify.matching import Fault, Scored, matching_faults, sample_name
from vime_core.verify.spread import spread
from vime_core.verify.ulps import BitComparison, compare_bits
from vime_core.verify.verdict import Coverage, Verdict

NAME: Final = "align"
LEAST_CHANGED: Final = 0.5
"""Share of bf16 weight elements that every update must change, lest stale weights pass for new ones."""


@dataclass(frozen=True)
class Phase:
    """Everything compared at one weight version.

    Args:
        weight_version: that both sides should hold.
        requests: what was asked for, in order.
        engine: what the engine answered, as it came back.
        trainer: what the trainer scored without gradients.
        training: the training forward's log-probs, where an optimizer step was taken on these samples.
        unequal_weights: names of weights whose digests differ between the sides.
        weights: how many weights were digested on both sides.
        changed: share of bf16 weight elements that the update to this version changed; None before the first.
        stops: tokens that end a response besides those of its request; None: the engine does not say.
        drawn: what the requests' seeds draw on the trainer's side, by key, or why that was not compared.
    """

    weight_version: int
    requests: tuple[SampleRequest, ...]
    engine: tuple[Scored, ...]
    trainer: tuple[Scored, ...]
    training: tuple[Scored, ...] = ()
    unequal_weights: tuple[str, ...] = ()
    weights: int = 0
    changed: float | None = None
    stops: frozenset[int] | None = None
    drawn: Mapping[SampleKey, Drawn] | str = "nobody drew again"


@dataclass(frozen=True)
class TokenPlace:
    """A response token, counted from 0."""

    weight_version: int
    key: SampleKey
    token: int

    def __str__(self) -> str:
        return f"weight version {self.weight_version}, {sample_name(self.key)}, token {self.token}"


@dataclass(frozen=True)
class TokenComparison:
    """Log-probs of all samples of a phase against one of the trainer's two forwards."""

    forward: str
    compared: BitComparison
    mean_difference: float
    first: TokenPlace | None
    values: tuple[float, float] | None

    @property
    def first_sentence(self) -> str:
        """Where it first differs, in words."""
        assert self.first is not None
        assert self.values is not None
        engine, trainer = (str(np.float32(value)) for value in self.values)
        return f"{self.first}: {engine} in the engine, {trainer} in the {self.forward}," + (
            f" {distance(self.compared.first_ulps)}"
        )


def compare_phase(phase: Phase) -> list[TokenComparison]:
    """The engine's log-probs against the trainer's scoring forward and, where there is one, its training forward.

    The pairing must be without `matching_faults`.
    """
    forwards = [("trainer's scoring forward", phase.trainer)]
    if phase.training:
        forwards.append(("trainer's training forward", phase.training))
    return [_compare(name, phase, trainer) for name, trainer in forwards]


def _compare(forward: str, phase: Phase, trainer: Sequence[Scored]) -> TokenComparison:
    by_key = {one.key: one.log_probs for one in trainer}
    engine, scored = _joined([o.log_probs for o in phase.engine]), _joined([by_key[o.key] for o in phase.engine])
    compared = compare_bits(engine, scored)
    with np.errstate(invalid="ignore"):
        mean = float(np.abs(engine.astype(np.float64) - scored).mean()) if engine.size else 0.0
    if compared.first is None:
        return TokenComparison(forward, compared, mean, None, None)
    place = _place(phase, compared.first)
    return TokenComparison(forward, compared, mean, place, (engine[compared.first], scored[compared.first]))


def _place(phase: Phase, flat: int) -> TokenPlace:
    for one in phase.engine:
        if flat < len(one.log_probs):
            return TokenPlace(phase.weight_version, one.key, flat)
        flat -= len(one.log_probs)
    raise IndexError(flat)


def _joined(rows: Sequence[Float32Array]) -> Float32Array:
    return np.concatenate([*rows, np.zeros(0, dtype=np.float32)])


@dataclass(frozen=True)
class Findings:
    """What a live comparison adds to the phases.

    Args:
        contract: id of the alignment contract; empty when none was promised.
        taps: taps of both sides for some samples (``--layers``).
        cause: what further experiments say about a difference; a clause.
        context: tokens that a sequence may have.
    """

    contract: str = ""
    context: int = 0
    taps: tuple[tuple[SampleKey, TapComparison], ...] = ()
    cause: str = ""


def align_verdict(phases: Sequence[Phase], findings: Findings | None = None) -> Verdict:
    """The verdict on what was collected.

    Holds when every requested sample was answered and scored once and whole, with the weight version that both sides
    should hold; when every log-prob of the engine has the bits of both of the trainer's forwards, none of them NaN,
    and every compared tap too; and when this could have shown a fault: log-probs vary, and each update changed at
    least `LEAST_CHANGED` of the weight elements.
    """
    found = findings or Findings()
    faults = [(phase, fault) for phase in phases for fault in phase_faults(phase)]
    if faults:
        return _with_faults(faults, phases)
    return next(verdict for verdict in _in_order(phases, found) if verdict is not None)


def phase_faults(phase: Phase) -> list[Fault]:
    """`matching_faults` of both forwards."""
    faults = matching_faults(phase.requests, phase.engine, phase.trainer, phase.weight_version, phase.stops)
    if phase.training and not faults:
        faults = matching_faults(phase.requests, phase.engine, phase.training, phase.weight_version)
    return faults


def _with_faults(faults: Sequence[tuple[Phase, Fault]], phases: Sequence[Phase]) -> Verdict:
    phase, fault = faults[0]
    more = f" ({len(faults)} such faults)" if len(faults) > 1 else ""
    return Verdict(
        NAME,
        False,
        f"Align does not hold: samples cannot be paired at weight version {phase.weight_version}; {fault}{more}.",
        coverage=Coverage(steps=len(phases)),
        unequal=len(faults),
        first=f"weight version {phase.weight_version}, {fault.place}",
    )


def _in_order(phases: Sequence[Phase], found: Findings) -> Iterator[Verdict | None]:
    compared = [(phase, comparison) for phase in phases for comparison in compare_phase(phase)]
    evidence = _evidence(phases, found, [comparison for _, comparison in compared])
    yield _other_weights(phases, evidence)
    yield _unequal(compared, evidence, found)
    yield _other_draws(phases, evidence)
    yield _unequal_taps(evidence, found)
    yield _idle(phases, evidence, found)
    yield _holds(phases, evidence, found)


def _evidence(phases: Sequence[Phase], found: Findings, compared: Sequence[TokenComparison]) -> Verdict:
    """A verdict without an outcome that already holds everything that was measured."""
    log_probs = [one.log_probs for phase in phases for one in phase.engine]
    scoring = [comparison for comparison in compared if comparison.forward == "trainer's scoring forward"]
    coverage = Coverage(
        steps=len(phases),
        samples=len(log_probs),
        tokens=sum(comparison.compared.compared for comparison in scoring),
        tensors=sum(phase.weights for phase in phases) + sum(len(taps.taps) for _, taps in found.taps),
        longest=max((_longest(phase) for phase in phases), default=0),
        log_probs=sum(comparison.compared.compared for comparison in compared),
    )
    shares = [phase.changed for phase in phases if phase.changed is not None]
    nan = any(comparison.compared.nan for comparison in compared)
    largest = max((comparison.compared.largest_difference for comparison in compared), default=0.0)
    details = {
        "contract": found.contract,
        "longest_position": coverage.longest - 1,
        "context_length": found.context,
        "phases": [_phase_json(phase) for phase in phases],
        "layers": [{"sample": list(key), **asdict(taps)} for key, taps in found.taps],
        "cause": found.cause,
        "draws": [asdict(one) if isinstance(one, DrawComparison) else one for one in map(_draws, phases)],
    }
    return Verdict(
        NAME,
        None,
        "",
        coverage,
        largest_difference=math.nan if nan else largest,
        largest_ulps=max((comparison.compared.largest_ulps for comparison in compared), default=0),
        entropy=spread(log_probs).entropy,
        changed=min(shares, default=None),
        details=details,
    )


def _longest(phase: Phase) -> int:
    """Tokens of the longest sequence of which something was compared."""
    prompts = {request.key: len(request.prompt_tokens) for request in phase.requests}
    return max((prompts[one.key] + len(one.tokens) for one in phase.engine if one.tokens), default=0)


def _phase_json(phase: Phase) -> dict[str, object]:
    return {
        "weight_version": phase.weight_version,
        "changed": phase.changed,
        "samples": len(phase.engine),
        "forwards": [
            {"forward": c.forward, **asdict(c.compared), "mean_difference": c.mean_difference}
            for c in compare_phase(phase)
        ],
    }


def _other_weights(phases: Sequence[Phase], evidence: Verdict) -> Verdict | None:
    for phase in phases:
        if phase.unequal_weights:
            name, count = phase.unequal_weights[0], len(phase.unequal_weights)
            at = f"weight version {phase.weight_version}"
            more = f" ({count} of {phase.weights} weights)" if count > 1 else ""
            why = f"at {at} the engine's kernels read another {name!r} than the trainer holds{more}"
            return _fails(evidence, why, count, f"{at}, weight {name!r}")
    return None


def _unequal(compared: Sequence[tuple[Phase, TokenComparison]], evidence: Verdict, found: Findings) -> Verdict | None:
    unequal = [comparison for _, comparison in compared if comparison.compared.unequal]
    if not unequal:
        return None
    bits = [comparison.compared for comparison in unequal]
    nan, count = (sum(getattr(one, name) for one in bits) for name in ("nan", "unequal"))
    total = sum(comparison.compared.compared for _, comparison in compared)
    mean = max(comparison.mean_difference for comparison in unequal)
    size = f"by at most {evidence.largest_difference:.3g} nats ({evidence.largest_ulps} ulps), {mean:.3g} in the mean"
    numbers = f"{nan} of them NaN" if nan else size
    why = f"{count} of {total} compared log-probs have other bits, {numbers}; first {unequal[0].first_sentence}"
    return _fails(evidence, why + _suspect(found), count, str(unequal[0].first))


def _suspect(found: Findings) -> str:
    where = next(
        (f"; first unequal tap, of {sample_name(k)}: {taps.first}" for k, taps in found.taps if taps.first), ""
    )
    if not found.contract:
        return f"{where}; no alignment contract is configured (alignment.contract), so none was promised"
    return where + (f"; {found.cause}" if found.cause else "")


def _draws(phase: Phase) -> DrawComparison | str:
    return phase.drawn if isinstance(phase.drawn, str) else compare_draws(phase.engine, phase.drawn)


def _other_draws(phases: Sequence[Phase], evidence: Verdict) -> Verdict | None:
    for phase in phases:
        draws = _draws(phase)
        if isinstance(draws, DrawComparison) and draws.unequal:
            place = f"weight version {phase.weight_version}, {draws.place}"
            why = (
                f"every log-prob is equal, but {draws.unequal} of {draws.compared} tokens are not what is drawn again;"
                f" first {place}: {draws.what}"
            )
            return _fails(evidence, why, draws.unequal, place)
    return None


def _draws_clause(phases: Sequence[Phase]) -> str:
    draws = [_draws(phase) for phase in phases]
    if reasons := [one for one in draws if isinstance(one, str)]:
        return f"which tokens were drawn was not compared, since {reasons[0]}"
    return "every token is the one that its request's seed draws from the trainer's distribution"


def _unequal_taps(evidence: Verdict, found: Findings) -> Verdict | None:
    for key, taps in found.taps:
        place = f"taps, {sample_name(key)}"
        if taps.first:
            why = f"every log-prob is equal, but a tap is not; {sample_name(key)}, {taps.first}"
            verdict = _fails(evidence, why, taps.unequal, f"{place}, {taps.first.tap}, position {taps.first.position}")
            sizes = [tap.largest_difference for tap in taps.taps]
            worst = math.nan if any(map(math.isnan, sizes)) else max(sizes)
            return replace(verdict, largest_difference=worst, largest_ulps=max(t.largest_ulps for t in taps.taps))
        if taps.faults:
            why = f"taps of {sample_name(key)} cannot be paired; {taps.faults[0]} ({len(taps.faults)} such faults)"
            return _fails(evidence, why, len(taps.faults), f"{place}, {taps.faults[0]}")
    return None


def _fails(evidence: Verdict, why: str, unequal: int, first: str) -> Verdict:
    return replace(evidence, holds=False, sentence=f"Align does not hold: {why}.", unequal=unequal, first=first)


def _idle(phases: Sequence[Phase], evidence: Verdict, found: Findings) -> Verdict | None:
    """The verdict when equality would mean nothing; None when it means something."""
    for phase in phases:
        values = spread([one.log_probs for one in phase.engine])
        at = f"at weight version {phase.weight_version}"
        if not sum(len(one.log_probs) for one in phase.engine):
            return _because(evidence, f"no sampled token was compared {at}", f"weight version {phase.weight_version}")
        if values.near_constant:
            why = (
                f"the log-probs hardly vary {at} (standard deviation {values.deviation:.2g} nats around an entropy of"
                f" {values.entropy:.3f}), so a fault could not show in them"
            )
            return _because(evidence, why, "log-probs")
        if phase.changed is not None and phase.changed < LEAST_CHANGED:
            why = (
                f"the update to weight version {phase.weight_version} changed {phase.changed:.1%} of the bf16 weight"
                f" elements, less than {LEAST_CHANGED:.0%}, so old weights could pass for new ones"
            )
            return _because(evidence, why, "weights")
    for key, taps in found.taps:
        if not taps.taps:
            return _because(evidence, f"neither side recorded a tap of {sample_name(key)}", "taps")
    if len(phases) < 2:
        return _because(evidence, "no log-probs were compared after a weight update", "weights")
    return None


def _because(evidence: Verdict, why: str, first: str) -> Verdict:
    return replace(evidence, sentence=f"Align could not be checked: {why}.", first=first)


def _holds(phases: Sequence[Phase], evidence: Verdict, found: Findings) -> Verdict:
    covered = evidence.coverage
    taps = sum(len(one.taps) for _, one in found.taps)
    layers = f", and so have all {taps} taps of {len(found.taps)} samples" if taps else ""
    sentence = (
        f"Align holds: the trainer's log-prob of every sampled token has the engine's bits ({covered.samples} samples"
        f" and {covered.tokens} tokens over {covered.steps} weight versions, 0 unequal), up to position"
        f" {covered.longest - 1} of {found.context - 1}{layers}; {_draws_clause(phases)}; every update changed"
        f" at least {evidence.changed or 0:.1%} of the bf16 weight elements, and the sampled distributions had"
        f" {evidence.entropy:.3f} nats of entropy a token."
    )
    return replace(evidence, holds=True, sentence=sentence)
