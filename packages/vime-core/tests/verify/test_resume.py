"""The verdict on a run that was killed and resumed, and what keeps it from holding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from synthetic import Step, change_step, flip_bit, make_run, write_run

from vime_core.record.reader import RunRecord
from vime_core.record.schema import ResumeEntry
from vime_core.record.writer import RecordWriter
from vime_core.verify.resume import verify_resume

BASE = make_run(4)


def entry(step: int, recorded: int) -> ResumeEntry:
    return ResumeEntry(step=step, recorded=recorded, vime_version="", plugins=(), platform={}, processes=())


def record(directory: Path, steps: list[Step], *resumed: ResumeEntry) -> RunRecord:
    write_run(directory, steps)
    writer = RecordWriter.resume(directory, resumed=resumed)
    writer.finish("complete")
    return RunRecord.open(directory)


def test_a_resumed_run_that_repeats_holds(tmp_path: Path) -> None:
    verdict = verify_resume(write_run(tmp_path / "a", BASE), record(tmp_path / "b", BASE, entry(2, 3)))
    assert verdict.holds is True
    assert verdict.name == "resume"
    assert verdict.sentence.startswith("Resume holds: both runs gave the same bits in all 4 steps")
    assert "killed with 3 steps recorded and went on from the checkpoint after step 2" in verdict.sentence


def test_a_bit_after_the_resume_does_not_hold(tmp_path: Path) -> None:
    other = change_step(
        BASE, 3, weights={**BASE[3].weights, "norm.weight": flip_bit(BASE[3].weights["norm.weight"], 1)}
    )
    verdict = verify_resume(write_run(tmp_path / "a", BASE), record(tmp_path / "b", other, entry(2, 3)))
    assert verdict.holds is False
    assert verdict.sentence.startswith("Resume does not hold.")
    assert "norm.weight" in verdict.sentence


@pytest.mark.parametrize(
    ("whole", "resumed", "why"),
    [
        ((), (), "the second run never went on from a checkpoint"),
        ((), (entry(0, 0),), "the second run never went on from a checkpoint"),
        ((), (entry(2, 4),), "the second run had recorded every step before it was stopped"),
        ((entry(1, 1),), (entry(2, 3),), "the run that must not be stopped was resumed too"),
    ],
)
def test_what_proves_nothing_is_not_checked(tmp_path: Path, whole: Any, resumed: Any, why: str) -> None:
    verdict = verify_resume(record(tmp_path / "a", BASE, *whole), record(tmp_path / "b", BASE, *resumed))
    assert verdict.holds is None
    assert why in verdict.sentence


@pytest.mark.parametrize(("step", "recorded"), [(-1, 0), (3, 2), (2, 9)])
def test_a_resume_that_cannot_have_been_is_found(tmp_path: Path, step: int, recorded: int) -> None:
    found = record(tmp_path / "b", BASE, entry(step, recorded)).check()
    assert found.holds is False
    assert f"resumed at step {step} with {recorded} steps recorded" in found.findings[0]
