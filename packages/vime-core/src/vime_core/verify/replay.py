"""Replay: the first unequal step of two records, done again with taps, so that the first unequal operation shows.

Pure but for reading records: the command line does the runs. Both runs go on from the start of the configuration that
their record holds, up to the step in question.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vime_core.record.reader import RunRecord
from vime_core.record.schema import StepEntry
from vime_core.types import SampleKey
from vime_core.verify.diff import diff_records
from vime_core.verify.difference import Difference


@dataclass(frozen=True)
class ReplayPlan:
    """What is done again: steps up to and with ``step``, with taps of one sample of it."""

    step: int
    sample: SampleKey

    def overrides(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Keys of the section ``run`` that the replay of a configuration changes; none decides a bit of a step."""
        taps = [f"{self.step}:{self.sample[0]}:{self.sample[1]}"] if config.get("alignment", {}).get("contract") else []
        return {"steps": self.step + 1, "taps": taps, "sinks": [], "checkpoint_every": 0}


def plan_replay(a: RunRecord, difference: Difference) -> ReplayPlan | None:
    """What to do again for a difference; None when it lies in no step that ``a`` holds."""
    step = difference.place.step
    entry = next((one for one in a.steps if one.step == step), None)
    if entry is None:
        return None
    samples = a.samples(entry.step)
    here = [sample.key for sample in samples if sample.key == difference.place.sample]
    return ReplayPlan(entry.step, here[0] if here else samples[0].key)


@dataclass(frozen=True)
class Replayed:
    """What two replays show.

    Args:
        plan: what was done again.
        difference: between the replays; None when they are equal.
        repeats: for each record, whether its replay gave the recorded bits up to the step.
    """

    plan: ReplayPlan
    difference: Difference | None
    repeats: tuple[bool, bool]

    @property
    def sentence(self) -> str:
        """All of it for a human."""
        if self.difference is None:
            return (
                f"Replayed here, both runs give equal bits up to step {self.plan.step}{self._repeats()}: what made"
                " them differ is not in their configurations, but in machine or environment, or does not repeat."
            )
        return f"Replayed{self._repeats()}: {self.difference.sentence}"

    def as_json(self) -> dict[str, Any]:
        """All of it as JSON values."""
        return {
            "step": self.plan.step,
            "sample": list(self.plan.sample),
            "repeats": list(self.repeats),
            "difference": self.difference and self.difference.as_json(),
            "sentence": self.sentence,
        }

    def _repeats(self) -> str:
        other = [name for name, same in zip(("first", "second"), self.repeats, strict=True) if not same]
        if not other:
            return ", each with the bits that its record holds"
        which = "neither run" if len(other) == 2 else f"the {other[0]} run not"
        return f", {which} with the bits that its record holds"


def compare_replays(
    plan: ReplayPlan, records: tuple[RunRecord, RunRecord], again: tuple[RunRecord, RunRecord]
) -> Replayed:
    """Compare two replays with each other, and each with its record.

    Raises:
        RecordError: a replay holds no step, or a record is damaged.
    """
    repeats = [_same(record, one, plan.step) for record, one in zip(records, again, strict=True)]
    return Replayed(plan, diff_records(*again), (repeats[0], repeats[1]))


def _same(record: RunRecord, again: RunRecord, step: int) -> bool:
    pairs = list(zip(record.steps, again.steps, strict=False))[: step + 1]
    return len(pairs) == step + 1 and all(_bits(one) == _bits(two) for one, two in pairs)


def _bits(entry: StepEntry) -> dict[str, Any]:
    return entry.model_dump(exclude={"timings"})
