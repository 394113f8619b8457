"""Taps of the samples that ``run.taps`` names, taken from both sides before the optimizer steps on them."""

from __future__ import annotations

from collections.abc import Sequence

from vime_core.backends import AlignedRollout, AlignedTrainer
from vime_core.errors import PluginError
from vime_core.loop.prompts import training_requests
from vime_core.loop.session import Session
from vime_core.record.taps import from_torch, taps_name, taps_to_parquet
from vime_core.types import Sample, SampleKey, TrainSequence


def take_taps(
    session: Session, step: int, samples: Sequence[Sample], sequences: Sequence[TrainSequence]
) -> dict[str, bytes]:
    """The taps of this step's chosen samples, as files by their names: the record writes them with the step.

    Args:
        session: whose configuration says which.
        step: number of the step.
        samples: of the step.
        sequences: what the trainer trains on, of the same keys.

    Raises:
        PluginError: a side keeps a contract without offering its taps.
    """
    chosen = tapped_samples(session.config.run.taps, step)
    if not chosen:
        return {}
    trainer, rollout = session.trainer, session.rollout
    if not isinstance(trainer, AlignedTrainer) or not isinstance(rollout, AlignedRollout):
        raise PluginError(
            f"run.taps = {list(session.config.run.taps)!r} needs taps of both sides, and a backend offers none",
            remedy="Leave out run.taps, or use backends that keep an alignment contract.",
            code="VIME-PLUGIN-033",
        )
    prompts = [session.prompts.take(index, 1)[0] for index in sorted({sample.prompt_index for sample in samples})]
    requests = {r.key: r for r in training_requests(session.config, step, prompts)}
    by_key = {sequence.key: sequence for sequence in sequences}
    files: dict[str, bytes] = {}
    for key in (sample.key for sample in samples if sample.key in chosen):
        files[taps_name(key, "engine")] = taps_to_parquet(from_torch(rollout.record_taps(requests[key])))
        files[taps_name(key, "trainer")] = taps_to_parquet(from_torch(trainer.record_taps(by_key[key])))
    return files


def tapped_samples(taps: Sequence[str], step: int) -> set[SampleKey]:
    """Keys of the samples of a step that ``run.taps`` names."""
    numbers = [tuple(map(int, one.split(":"))) for one in taps]
    return {(prompt, sample) for at, prompt, sample in numbers if at == step}
