"""Why does a log-prob differ? Experiments on the live sides, made only when one does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from vime_core.alignment.taps import EMBEDDING, LOGITS
from vime_core.backends import AlignedRollout, AlignedTrainer
from vime_core.errors import PluginError
from vime_core.loop.sides import Sides
from vime_core.record.taps import TapRows, from_torch
from vime_core.types import SampleKey, SampleRequest, scoring_sequence
from vime_core.verify.align import Phase
from vime_core.verify.layers import TapComparison, compare_taps
from vime_core.verify.live import answers, score
from vime_core.verify.matching import Scored, sample_name
from vime_core.verify.temperature import Fit, fit_temperature
from vime_core.verify.ulps import compare_bits

ORDER: Final = (
    "the engine's log-probs are, bit for bit, those of this response under the prompt of {other}, so answers were"
    " collected in another order than they were asked for"
)
COMPANY: Final = (
    "alone and from an empty prefix cache the engine gives the trainer's bits, so its answer depends on the requests"
    " beside it or on its cache (see the verdict batch)"
)
INTERNAL: Final = "the engine's answer is the same alone, so neither its batch nor its cache is the cause"
UNSTABLE: Final = (
    "asked once more, alone and with taps, the engine gave another response, so its answer depends on more than weights"
    " and request"
)


def find_cause(sides: Sides, phase: Phase, key: SampleKey) -> tuple[str, TapComparison | None]:
    """What experiments say about the first unequal sample: a clause, and its taps where both sides have them."""
    request = next(r for r in phase.requests if r.key == key)
    engine = next(one for one in phase.engine if one.key == key)
    if other := _prompt_that_fits(sides, phase, engine):
        return ORDER.format(other=sample_name(other)), None
    trainer = next(one for one in phase.trainer if one.key == key)
    if isinstance(sides.rollout, AlignedRollout):
        sides.rollout.keep_prefix_cache(False)
    alone = answers(sides.rollout.generate([request]))[0]
    if alone.tokens == engine.tokens and alone.log_probs.tobytes() == engine.log_probs.tobytes():
        return _inside(sides, request, engine, trainer)
    rescored = score(
        sides, [scoring_sequence(key, request.prompt_tokens, alone.tokens, alone.kept)], phase.weight_version
    )
    if _same(alone, rescored[0]):
        return COMPANY, None
    cause, taps = _inside(sides, request, alone, rescored[0])
    return f"the engine gives another answer alone than in company, and both differ from the trainer; {cause}", taps


def taps_of(sides: Sides, request: SampleRequest, response: tuple[int, ...]) -> TapComparison:
    """Compare the taps of one response on both sides. Raises PluginError when one of them records none."""
    engine, trainer = _record(sides, request, response)
    length = len(request.prompt_tokens) + len(response)
    return compare_taps(engine, trainer, len(request.prompt_tokens), length)


def _record(
    sides: Sides, request: SampleRequest, response: tuple[int, ...]
) -> tuple[dict[str, TapRows], dict[str, TapRows]]:
    rollout, trainer = sides.rollout, sides.trainer
    if not isinstance(rollout, AlignedRollout) or not isinstance(trainer, AlignedTrainer):
        lacking = "rollout" if not isinstance(rollout, AlignedRollout) else "trainer"
        raise PluginError(
            f"the {lacking} backend keeps alignment.contract, but does not offer what verdicts ask of it",
            remedy=f"Its class must have every method of vime_core.backends.Aligned{lacking.capitalize()}.",
            code="VIME-PLUGIN-032",
        )
    sequence = scoring_sequence(request.key, request.prompt_tokens, response)
    return from_torch(rollout.record_taps(request)), from_torch(trainer.record_taps(sequence))


def _prompt_that_fits(sides: Sides, phase: Phase, engine: Scored) -> SampleKey | None:
    """Another sample whose prompt makes the trainer's log-probs of this response the engine's, bit for bit."""
    own = next(r for r in phase.requests if r.key == engine.key).prompt_tokens
    others: dict[tuple[int, ...], SampleKey] = {}
    room = sides.parts.config.rollout.context_length - len(engine.tokens)
    for request in phase.requests:
        if request.prompt_tokens != own and len(request.prompt_tokens) <= room:
            others.setdefault(request.prompt_tokens, request.key)
    sequences = [scoring_sequence(key, prompt, engine.tokens, engine.kept) for prompt, key in others.items()]
    scored = score(sides, sequences, phase.weight_version) if sequences else []
    return next((one.key for one in scored if _same(one, engine)), None)


def _same(a: Scored, b: Scored) -> bool:
    return a.tokens == b.tokens and compare_bits(a.log_probs, b.log_probs).unequal == 0


def _inside(sides: Sides, request: SampleRequest, engine: Scored, trainer: Scored) -> tuple[str, TapComparison | None]:
    if not (isinstance(sides.rollout, AlignedRollout) and isinstance(sides.trainer, AlignedTrainer)):
        return INTERNAL, None
    taps, other = _record(sides, request, engine.tokens)
    length = len(request.prompt_tokens) + len(engine.tokens)
    compared = compare_taps(taps, other, len(request.prompt_tokens), length)
    if compared.first and compared.first.tap == EMBEDDING and compared.first.position >= len(request.prompt_tokens):
        return UNSTABLE, None  # the sides were fed other tokens, so nothing else was compared
    if compared.first or compared.faults or LOGITS not in taps:
        return INTERNAL, compared
    asked = request.temperature or 1.0
    return after_equal_logits(_response_logits(taps[LOGITS], request, length), engine, trainer, asked), compared


def _response_logits(logits: TapRows, request: SampleRequest, length: int) -> TapRows:
    chosen = (logits.positions >= len(request.prompt_tokens) - 1) & (logits.positions < length - 1)
    return TapRows(logits.positions[chosen], logits.rows[chosen], logits.dtype)


def after_equal_logits(logits: TapRows, engine: Scored, trainer: Scored, asked: float) -> str:
    """What differs when all taps up to the logits are equal: the temperature, or the log-softmax itself."""
    for side, scored in (("engine", engine), ("trainer", trainer)):
        if np.isnan(scored.log_probs).any():
            return f"every tap up to the logits is equal, so the NaN of the {side} arises after them"
    values = logits.rows
    if logits.dtype == "bfloat16":
        values = (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    tokens = np.array(engine.tokens, dtype=np.int64)
    fits = [fit_temperature(values, tokens, side.log_probs) for side in (engine, trainer)]
    return f"every tap up to the logits is equal, so the sides part after them: {_temperatures(fits, asked)}"


def _temperatures(fits: Sequence[Fit], asked: float) -> str:
    engine, trainer = fits
    if not (engine.explains and trainer.explains):
        side = "engine" if not engine.explains else "trainer"
        return f"no temperature explains the log-probs of the {side}"
    if f"{engine.temperature:.4f}" == f"{trainer.temperature:.4f}":
        return "both use one temperature, so their log-softmax differs"
    return (
        f"the engine's log-probs belong to temperature {engine.temperature:.4f}, the trainer's to"
        f" {trainer.temperature:.4f}, where {asked:.4f} was asked for"
    )
