"""One step of a run: generate, score, train, update the engine, record. Read it from top to bottom."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from vime_core.backends import NamedTensors
from vime_core.loop.algorithm import corrected, in_order_of, with_old_log_probs
from vime_core.loop.aligned import require_aligned
from vime_core.loop.batch import step_samples
from vime_core.loop.evaluation import (
    distance_metrics,
    evaluate,
    evaluated_again,
    evaluation_metrics,
    require_aligned_evaluation,
)
from vime_core.loop.metrics import step_metrics
from vime_core.loop.reference import penalised_rewards, reference_log_probs
from vime_core.loop.session import Session
from vime_core.loop.taps import take_taps
from vime_core.loop.timing import PhaseTimer
from vime_core.loop.weights import require_equal_weights
from vime_core.record.digest import digest_tensors, merkle_root
from vime_core.record.samples import log_prob_digest, sample_columns, sampled_digests, step_digests
from vime_core.record.schema import Digests, StepEntry, UpdateEntry
from vime_core.rl.selection import overlong_penalty
from vime_core.types import Float32Array, Sample, TrainSequence, TrainStepResult


@dataclass
class GradientRecorder:
    """Digests the gradients where the trainer shows them."""

    digests: dict[str, str] = field(default_factory=dict[str, str])
    timer: PhaseTimer = field(default_factory=PhaseTimer)

    def gradients(self, tensors: NamedTensors) -> None:
        with self.timer("record"):
            self.digests = digest_tensors(tensors)


@dataclass(frozen=True)
class Update:
    """One optimizer step with what was recorded of it."""

    result: TrainStepResult
    log_probs: list[Float32Array]
    entry: UpdateEntry


def run_step(session: Session, step: int) -> dict[str, float]:
    """Do step number ``step`` (from 0) and return its metrics."""
    timer = PhaseTimer()
    evaluated = evaluate(session, step, timer)
    evaluation = [sample for samples in evaluated.values() for sample in samples]
    with timer("evaluation"):
        again = evaluated_again(session, evaluation)
    generated = step_samples(session, step, timer)
    samples = generated.samples
    reference = _reference(session, samples, timer)
    with timer("advantages"):
        lost = _lost_to_length(session, samples)
        rewards = [reward + one for reward, one in zip(_rewards(session, samples, reference), lost, strict=True)]
        advantages = session.algorithm.advantages(rewards, _present(session, samples))
    metrics: dict[str, float] = {}
    updates, later, taps = _train(session, step, Batch(samples, advantages, reference), timer, metrics)
    weights = _update_engine(session, step, timer)
    train_log_probs = [values for update in updates for values in update.log_probs]
    metrics |= step_metrics(samples, train_log_probs, [u.result for u in updates], timer)
    metrics |= {
        "reward/overlong_penalty": math.fsum(lost) / len(lost),
        "reward/timed_out": float(generated.rewards_timed_out),
        "data/dropped": float(session.prompts.dropped),
        "data/no_signal": float(generated.left_out),
    }
    metrics |= evaluation_metrics(evaluated) | distance_metrics(evaluation, again)
    with timer("record"):
        entry = _entry(session, step, samples, advantages, updates, weights, metrics, timer, reference)
        entry = entry.model_copy(
            update={"evaluation": sampled_digests(sample_columns(evaluation))} if evaluation else {}
        )
        session.rewind_sinks()
        session.writer.write_step(entry, samples, train_log_probs, advantages, evaluation, reference, taps)
    require_aligned_evaluation(session, step, evaluation, again)
    require_aligned(session.config.alignment.contract, f"step {step}", samples, [*updates[0].log_probs, *later])
    return {**metrics, "time/record": timer.seconds["record"], "time/step": timer.total()}


@dataclass(frozen=True)
class Batch:
    """What a step trains on; ``reference`` are the reference model's log-probs where there is one."""

    samples: list[Sample]
    advantages: Float32Array
    reference: list[Float32Array] | None


def _reference(session: Session, samples: Sequence[Sample], timer: PhaseTimer) -> list[Float32Array] | None:
    if session.reference is None:
        return None
    with timer("reference"):
        return reference_log_probs(session.algorithm, session.reference, samples)


def _rewards(session: Session, samples: Sequence[Sample], reference: Sequence[Float32Array] | None) -> list[float]:
    coefficient = session.config.algorithm.reward_kl
    if reference is None or not coefficient:
        return [sample.reward for sample in samples]
    return penalised_rewards(samples, reference, coefficient)


def _lost_to_length(session: Session, samples: Sequence[Sample]) -> list[float]:
    """What each reward loses to its response's length, 0 or less; the record keeps the reward as it was given."""
    section, longest = session.config.algorithm, session.config.sampling.max_tokens
    if not section.overlong_buffer:
        return [0.0] * len(samples)
    penalties = [overlong_penalty(len(s.response_tokens), longest, section.overlong_buffer) for s in samples]
    return [section.overlong_weight * penalty for penalty in penalties]


def _present(session: Session, samples: Sequence[Sample]) -> list[bool] | None:
    """Which samples have a part in their groups' advantages; None: all."""
    if session.config.algorithm.overlong != "drop":
        return None
    return [sample.finish_reason != "length" for sample in samples]


def _train(
    session: Session, step: int, batch: Batch, timer: PhaseTimer, metrics: dict[str, float]
) -> tuple[list[Update], list[Float32Array], dict[str, bytes]]:
    """The optimizer steps, what :func:`_scored_before` says, and files of taps."""
    samples, hook = batch.samples, session.plugins.hook
    hook.vime_before_log_probs(step=step, trainer=session.trainer, samples=samples)
    minibatches = session.algorithm.minibatches(samples, batch.advantages, batch.reference)
    with timer("log_probs"):
        minibatches = _old_log_probs(session, samples, minibatches)
        later = _scored_before(session, minibatches[1:])
    with timer("record"):
        taps = take_taps(session, step, samples, [sequence for part in minibatches for sequence in part])
    if session.config.algorithm.correction.active:
        minibatches, found = corrected(session.config.algorithm.correction, minibatches, samples)
        metrics |= found
    hook.vime_before_train_step(step=step, trainer=session.trainer)
    return [_optimize(session, sequences, timer) for sequences in minibatches], later, taps


def _scored_before(session: Session, later: Sequence[Sequence[TrainSequence]]) -> list[Float32Array]:
    """Log-probs, by the weights that sampled them, of what later optimizer steps train on; for a contract."""
    if not session.config.alignment.contract:
        return []
    return [values for sequences in later for values in _score(session, sequences)]


def _old_log_probs(
    session: Session, samples: Sequence[Sample], minibatches: list[list[TrainSequence]]
) -> list[list[TrainSequence]]:
    choice = session.config.algorithm.old_log_probs
    if choice == "reuse":
        return minibatches
    if choice == "rollout":
        by_key = {sample.key: sample.rollout_log_probs for sample in samples}
        return [with_old_log_probs(part, [by_key[s.key] for s in part]) for part in minibatches]
    return [with_old_log_probs(part, _score(session, part)) for part in minibatches]


def _score(session: Session, sequences: Sequence[TrainSequence]) -> list[Float32Array]:
    microbatches = session.algorithm.microbatches(sequences)
    return in_order_of(sequences, microbatches, session.trainer.log_probs(microbatches))


def _optimize(session: Session, sequences: Sequence[TrainSequence], timer: PhaseTimer) -> Update:
    recorder = GradientRecorder(timer=PhaseTimer())
    microbatches = session.algorithm.microbatches(sequences)
    with timer("train"):
        result = session.trainer.train_step(microbatches, session.algorithm.loss, recorder)
    hashing = recorder.timer.seconds.get("record", 0.0)
    timer.move(hashing, source="train", target="record")
    log_probs = in_order_of(sequences, microbatches, result.log_probs)
    entry = UpdateEntry(
        loss=result.loss.hex(),
        grad_norm=result.grad_norm.hex(),
        learning_rate=result.learning_rate.hex(),
        train_log_probs=log_prob_digest([s.key for s in sequences], log_probs),
        gradients=recorder.digests,
        gradients_root=merkle_root(recorder.digests),
        samples=len(sequences),
    )
    return Update(result, log_probs, entry)


def _update_engine(session: Session, step: int, timer: PhaseTimer) -> Digests:
    session.weight_version = step + 1
    with timer("record"):
        wanted = digest_tensors(session.trainer.weights())
    with timer("weight_update"):
        held = session.rollout.update_weights(session.trainer.weights(), session.weight_version)
    require_equal_weights(wanted, held, session.weight_version)
    session.plugins.hook.vime_after_weight_update(step=step, trainer=session.trainer, rollout=session.rollout)
    return wanted


def _entry(
    session: Session,
    step: int,
    samples: Sequence[Sample],
    advantages: Float32Array,
    updates: Sequence[Update],
    weights: Digests,
    metrics: dict[str, float],
    timer: PhaseTimer,
    reference: Sequence[Float32Array] | None,
) -> StepEntry:
    digests = step_digests(samples, np.asarray(advantages))
    optimizer = digest_tensors(session.trainer.optimizer_state())
    return StepEntry(
        step=step,
        weight_version=samples[0].weight_version,
        prompts=digests.prompts,
        tokens=digests.tokens,
        rollout_log_probs=digests.rollout_log_probs,
        rewards=digests.rewards,
        reference_log_probs="" if reference is None else log_prob_digest([s.key for s in samples], reference),
        advantages=digests.advantages,
        updates=tuple(update.entry for update in updates),
        weights=weights,
        weights_root=merkle_root(weights),
        optimizer=optimizer,
        optimizer_root=merkle_root(optimizer),
        metrics={name: value.hex() for name, value in metrics.items() if not name.startswith("time/")},
        timings=dict(timer.seconds),
    )
