"""Steps that are done anew: the old ones go when the first new one is there, and never before."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from synthetic import change_sample, make_run, manifest, with_evaluation, write_run, write_step

from vime_core.errors import RecordError
from vime_core.record import replacing
from vime_core.record.points import observed
from vime_core.record.reader import RunRecord
from vime_core.record.writer import RecordWriter

KILLED = 9
OLD = with_evaluation(with_evaluation(make_run(4), 1), 3)
NEW = with_evaluation([change_sample(make_run(3), n, 0, reward=0.25)[n] for n in range(3)], 1)


TAPPED = {1: {"engine": b"old 1", "trainer": b"old 1"}, 2: {"engine": b"old 2"}, 3: {"engine": b"old 3"}}
TAPPED_ANEW = {0: {"engine": b"new 0"}, 1: {"engine": b"new 1"}}


def old_record(directory: Path) -> RunRecord:
    writer = RecordWriter.create(directory, manifest())
    for step in OLD:
        write_step(writer, step, TAPPED.get(step.step, {}))
    return RunRecord.open(directory)


def taps_of(record: RunRecord) -> list[dict[str, bytes]]:
    """Files of the taps of every recorded step."""
    folders = [record.taps_folder(entry.step) for entry in record.steps]
    return [{path.name: path.read_bytes() for path in folder.glob("*")} for folder in folders]


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
            write_step(writer, step, TAPPED_ANEW.get(step.step, {}))
        writer.finish("failed")
    os._exit(0)


@pytest.mark.parametrize("first", [1, 0])
def test_a_kill_at_any_point_leaves_the_old_steps_or_new_ones(tmp_path: Path, first: int) -> None:
    old = old_record(tmp_path / "old").step_lines
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
        taps = [(TAPPED_ANEW if line in new else TAPPED).get(n, {}) for n, line in enumerate(found.step_lines)]
        assert taps_of(found) == taps
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


def test_a_step_that_is_compared_keeps_the_taps_that_it_has(tmp_path: Path) -> None:
    """Other taps, which the caller had before the comparison, do not reach the record."""
    before = taps_of(old_record(tmp_path / "run"))
    writer = RecordWriter.resume(tmp_path / "run")
    write_step(writer, OLD[0], {"engine": b"other"})
    write_step(writer, OLD[1], {"engine": b"other"})
    assert taps_of(RunRecord.open(tmp_path / "run")) == before


def test_taps_of_a_step_that_has_no_line_are_removed(tmp_path: Path) -> None:
    old_record(tmp_path / "run")
    lines = (tmp_path / "run" / "steps.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "run" / "steps.jsonl").write_bytes(b"".join(lines[:2]) + lines[2][:50])
    RecordWriter.resume(tmp_path / "run")
    assert [path.name for path in (tmp_path / "run" / "taps").iterdir()] == ["step-000001"]


def write_anew(record: Path, then: Callable[[], None]) -> None:
    with RecordWriter.resume(record, replace_from=1) as writer:
        then()
        write_step(writer, NEW[1], TAPPED_ANEW[1])


def test_a_disk_that_refuses_after_the_new_line_leaves_a_record_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    old_record(tmp_path / "run")
    with (
        monkeypatch.context() as patch,
        pytest.raises(RecordError, match=r"cannot write .*samples.*Input/output error"),
    ):
        write_anew(tmp_path / "run", lambda: patch.setattr(replacing, "_take_name", refuse))
    found = RunRecord.open(tmp_path / "run")
    assert (found.manifest.status, found.manifest.steps, found.check().findings) == ("failed", 2, ())
    assert taps_of(found)[1] == TAPPED_ANEW[1]
    RecordWriter.resume(tmp_path / "run")
    assert taps_of(RunRecord.open(tmp_path / "run"))[1] == TAPPED_ANEW[1]
    assert list((tmp_path / "run").rglob(".step*")) == []
