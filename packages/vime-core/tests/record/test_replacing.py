"""Steps that are done anew: the old ones go when the first new one is there, and never before."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from synthetic import change_sample, make_run, with_evaluation, write_run, write_step

from vime_core.errors import RecordError
from vime_core.record.points import observed
from vime_core.record.reader import RunRecord
from vime_core.record.writer import RecordWriter

KILLED = 9
OLD = with_evaluation(with_evaluation(make_run(4), 1), 3)
NEW = with_evaluation([change_sample(make_run(3), n, 0, reward=0.25)[n] for n in range(3)], 1)


def replace(record: Path, first: int, kill_at: int) -> int:
    """Do steps from ``first`` to 2 anew in a process that dies at a write point; its exit code."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        replace_here(record, first, kill_at)
    finally:
        os._exit(1)


def replace_here(record: Path, first: int, kill_at: int) -> None:
    points: list[str] = []

    def observe(point: str, path: Path) -> None:
        points.append(point)
        if len(points) == kill_at:
            os._exit(KILLED)

    with observed(observe):
        writer = RecordWriter.resume(record, replace_from=first)
        for step in NEW[first:]:
            write_step(writer, step)
        writer.finish("failed")
    os._exit(0)


@pytest.mark.parametrize("first", [1, 0])
def test_a_kill_at_any_point_leaves_the_old_steps_or_new_ones(tmp_path: Path, first: int) -> None:
    old = write_run(tmp_path / "old", OLD, status="running").step_lines
    seen: list[int] = []
    kill_at, code = 0, KILLED
    while code == KILLED:
        kill_at += 1
        record = Path(shutil.copytree(tmp_path / "old", tmp_path / f"killed-{kill_at}"))
        code = replace(record, first, kill_at)
        found = RunRecord.open(record)
        assert found.check().findings == ()
        new = [line for line in found.step_lines if line not in old]
        assert found.step_lines == (old if not new else (*old[:first], *new))
        seen.append(len(new))
        if code == KILLED and found.manifest.status == "running":
            assert replace(record, first, 0) == 0
            assert RunRecord.open(record).check().findings == ()
            assert len(RunRecord.open(record).steps) == 3
            assert list(record.rglob(".*")) == []
    assert code == 0
    assert seen == sorted(seen)
    assert {*seen} == {*range(4 - first)}
    assert seen.count(1) > 5  # points between the new line and the end of what it replaces


def test_a_run_that_fails_before_it_has_a_new_step_keeps_what_it_had(tmp_path: Path) -> None:
    lines = write_run(tmp_path / "run", OLD, status="running").step_lines
    RecordWriter.resume(tmp_path / "run", replace_from=1).finish("failed", "the engine did not start")
    found = RunRecord.open(tmp_path / "run")
    assert (found.step_lines, found.manifest.steps, found.check().findings) == (lines, 4, ())


def test_the_new_step_is_the_one_that_belongs_there(tmp_path: Path) -> None:
    write_run(tmp_path / "run", OLD, status="running")
    writer = RecordWriter.resume(tmp_path / "run", replace_from=1)
    with pytest.raises(RecordError, match="step 2 comes where step 1 belongs"):
        write_step(writer, NEW[2])
