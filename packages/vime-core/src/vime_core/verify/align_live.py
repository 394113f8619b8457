"""The verdict *align* on a live trainer and engine, before and after optimizer steps with online weight updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from vime_core.config.schema import RunConfig
from vime_core.errors import ConfigError, ContractViolation, NotFinite, VimeError
from vime_core.loop.sides import Sides
from vime_core.record.digest import digest_tensors
from vime_core.types import SampleKey, SampleRequest
from vime_core.verify.align import (
    NAME,
    Findings,
    Phase,
    TokenComparison,
    align_verdict,
    compare_phase,
    phase_faults,
)
from vime_core.verify.layers import TapComparison
from vime_core.verify.live import (
    answers,
    bfloat16_weights,
    changed_share,
    draw_again,
    engine_stops,
    first_requests,
    score,
    sequences_of,
    take_step,
)
from vime_core.verify.reach import reaching_requests
from vime_core.verify.suspects import find_cause, taps_of
from vime_core.verify.verdict import Verdict

__all__ = ["AlignOptions", "verify_align"]


@dataclass(frozen=True)
class AlignOptions:
    """How much is compared.

    Args:
        samples: requests of the run that are compared, from its first on; 0: those of its first step.
        updates: optimizer steps, each followed by an online weight update and another comparison.
        layers: compare taps too, of the shortest and the longest answer.
        longest: tokens of the longest sequence that is asked for beside them; 0: rollout.context_length.
    """

    samples: int = 0
    updates: int = 2
    layers: bool = False
    longest: int = 0


def verify_align(
    sides: Sides, options: AlignOptions, first_version: int = 0, requests: Sequence[SampleRequest] = ()
) -> Verdict:
    """Generate, score, compare; step, update, and compare again.

    Args:
        sides: open, with a learning rate that moves bf16 weights (`vime_core.verify.live.with_learning_rate`).
        options: how much.
        first_version: the weight version that the engine holds now.
        requests: what is compared besides, instead of the run's own first requests.

    Raises:
        ConfigError: ``layers`` is asked for without a contract, or ``longest`` is more than the context holds.
        BackendError: a side died, or gave an answer that no comparison can use.
    """
    require_options(sides.parts.config, options)
    compared = list(requests) or first_requests(sides.parts, options.samples)
    compared += reaching_requests(sides.parts, compared, options.longest)
    comparison = _Comparison(sides, options, compared)
    try:
        comparison.run(first_version)
    except (ContractViolation, NotFinite) as error:
        return _violated(error, comparison.phases)
    return align_verdict(comparison.phases, comparison.findings)


def require_options(config: RunConfig, options: AlignOptions) -> None:
    """Raise ConfigError when taps are asked for without the contract whose operations have them, or more than fits."""
    if options.longest > config.rollout.context_length:
        raise ConfigError(
            f"--longest {options.longest} is more than rollout.context_length = {config.rollout.context_length}",
            remedy=f"Give at most {config.rollout.context_length}, or leave out --longest to reach so far.",
            code="VIME-CONFIG-070",
        )
    if options.layers and not config.alignment.contract:
        raise ConfigError(
            "--layers compares taps, which the operations of a contract record, but alignment.contract = ''",
            remedy="Set alignment.contract (--set alignment.contract=dense/v1), or leave out --layers.",
            code="VIME-CONFIG-070",
        )


def _violated(error: VimeError, phases: Sequence[Phase]) -> Verdict:
    """A side caught itself. What was compared before comes first, if that already does not hold."""
    if phases and (verdict := align_verdict(phases)).holds is False:
        return verdict
    after = f", after the comparison at weight version {phases[-1].weight_version}" if phases else ""
    sentence = f"Align does not hold: {error.message} ({error.code}{after})."
    return Verdict(NAME, False, sentence, unequal=1, first=f"{error.code}{after}")


class _Comparison:
    """Collects phases, and what experiments say where the first difference shows."""

    def __init__(self, sides: Sides, options: AlignOptions, requests: Sequence[SampleRequest]) -> None:
        self._sides = sides
        self._options = options
        self._requests = tuple(requests)
        self.phases: list[Phase] = []
        alignment = sides.parts.alignment
        context = sides.parts.config.rollout.context_length
        self.findings = Findings(contract="" if alignment is None else alignment.contract.id, context=context)

    def run(self, first_version: int) -> None:
        changed: float | None = None
        for update in range(self._options.updates + 1):
            version = first_version + update
            phase = self._phase(version, changed)
            if phase_faults(phase):
                return
            last = update == self._options.updates
            compared = compare_phase(phase)
            self._look_inside(phase, compared, last=last)
            if any(one.compared.nan for one in compared):
                return  # no trainer steps on these
            if not last:
                changed = self._update(version)

    def _phase(self, version: int, changed: float | None) -> Phase:
        held, wanted = dict(self._sides.rollout.weight_digests()), digest_tensors(self._sides.trainer.weights())
        unequal = tuple(name for name in {**wanted, **held} if wanted.get(name) != held.get(name))
        completions = self._sides.rollout.generate(self._requests)
        self._completions = completions
        sequences = sequences_of(self._requests, completions)
        phase = Phase(
            weight_version=version,
            requests=self._requests,
            engine=tuple(answers(completions)),
            trainer=tuple(score(self._sides, sequences, version)),
            unequal_weights=unequal,
            weights=len({**wanted, **held}),
            changed=changed,
            stops=engine_stops(self._sides),
        )
        if not phase_faults(phase):
            phase = replace(phase, drawn=draw_again(self._sides, self._requests, sequences))
        self.phases.append(phase)
        return phase

    def _look_inside(self, phase: Phase, compared: Sequence[TokenComparison], *, last: bool) -> None:
        """Experiments on the first difference under a contract; taps where they were asked for."""
        unequal = next((one.first for one in compared if one.first), None)
        if unequal is not None and self.findings.contract and not self.findings.cause:
            cause, taps = find_cause(self._sides, phase, unequal.key)
            found = ((unequal.key, taps),) if taps else ()
            self.findings = replace(self.findings, cause=cause, taps=found)
        if self._options.layers and last and not self.findings.cause:
            self.findings = replace(self.findings, taps=tuple(self._taps(phase)))

    def _taps(self, phase: Phase) -> list[tuple[SampleKey, TapComparison]]:
        by_key = {request.key: request for request in phase.requests}
        by_length = sorted(
            (one for one in phase.engine if one.tokens),
            key=lambda one: len(by_key[one.key].prompt_tokens) + len(one.tokens),
        )
        chosen = {one.key: one for one in (*by_length[:1], *by_length[-1:])}
        return [(key, taps_of(self._sides, by_key[key], one.tokens)) for key, one in chosen.items()]

    def _update(self, version: int) -> float:
        """One optimizer step and one online update; the share of weight elements that it changed."""
        before = bfloat16_weights(self._sides.trainer)
        training = take_step(self._sides, self._requests, self._completions, version)
        self.phases[-1] = replace(self.phases[-1], training=tuple(training))
        share = changed_share(before, bfloat16_weights(self._sides.trainer))
        self._sides.rollout.update_weights(self._sides.trainer.weights(), version + 1)
        return share
