"""Where a record lies: what takes it away, refuses it, or takes it twice, while it is written or resumed."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from synthetic import make_run, make_step, manifest, write_run, write_step

from vime_core.errors import RecordError
from vime_core.plugins.types import Options
from vime_core.record import files, seal
from vime_core.record.points import observed
from vime_core.record.reader import RunRecord
from vime_core.record.writer import RecordWriter
from vime_core.sinks.jsonl import open_sink


def move(record: Path) -> None:
    record.rename(record.with_name("elsewhere"))


def replace(record: Path) -> None:
    move(record)
    (record / "samples").mkdir(parents=True)


def lose(record: Path, how: Callable[[Path], None], *, at_end: bool) -> None:
    with RecordWriter.create(record, manifest()) as writer:
        write_step(writer, make_step(0))
        how(record)
        if not at_end:
            write_step(writer, make_step(1))
        writer.finish("complete")


@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("how", [move, replace])
def test_a_record_that_is_moved_while_it_is_written_goes_on_where_it_is(
    tmp_path: Path, how: Callable[[Path], None], at_end: bool
) -> None:
    record = tmp_path / "run"
    with pytest.raises(RecordError, match="was moved or removed while the run wrote") as caught:
        lose(record, how, at_end=at_end)
    assert (caught.value.code, str(record) in caught.value.message) == ("VIME-RECORD-059", True)
    assert "vime run --resume" in caught.value.remedy
    assert caught.value.__notes__ == [f"the record, of 1 steps, is no longer at {str(record)!r}"]
    assert [path for path in record.rglob("*") if path.is_file()] == []
    found = RunRecord.open(tmp_path / "elsewhere")
    assert (found.manifest.status, len(found.steps), found.check().findings) == ("running", 1, ())
    with RecordWriter.resume(tmp_path / "elsewhere", found=found) as writer:
        write_step(writer, make_step(0))
        write_step(writer, make_step(1))
        writer.finish("complete")
    assert RunRecord.open(tmp_path / "elsewhere").check().holds


def test_a_directory_that_another_process_makes_first_exists_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = write_run(tmp_path / "run", make_run(1), status="running").directory
    before = {path: path.read_bytes() for path in first.rglob("*") if path.is_file()}
    monkeypatch.setattr(files, "refuse_existing", lambda _: None)  # it was not there yet
    with pytest.raises(RecordError, match="exists already") as caught:
        RecordWriter.create(first, manifest())
    assert caught.value.code == "VIME-RECORD-001"
    assert {path: path.read_bytes() for path in first.rglob("*") if path.is_file()} == before


def test_a_resume_that_another_one_overtook_is_refused(tmp_path: Path) -> None:
    found = write_run(tmp_path / "run", make_run(1), status="running")
    RecordWriter.resume(tmp_path / "run", found=found, resumed=found.manifest.resumed)  # nothing happened in it
    with RecordWriter.resume(tmp_path / "run", found=found) as writer:
        write_step(writer, make_step(0))
        write_step(writer, make_step(1))
    after = RunRecord.open(tmp_path / "run")
    for replace_from in (None, 0):
        with pytest.raises(RecordError, match="was resumed by another process") as caught:
            RecordWriter.resume(tmp_path / "run", found=found, replace_from=replace_from)
        assert caught.value.code == "VIME-RECORD-060"
    now = RunRecord.open(tmp_path / "run")
    assert (now.manifest, now.step_lines, now.check().findings) == (after.manifest, after.step_lines, ())


@contextmanager
def refusing(monkeypatch: pytest.MonkeyPatch, number: int, *names: str) -> Any:
    """As of a disk that has become read-only: calls of ``os`` fail."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        for name in names:
            patch.setattr(os, name, refuse)
        yield


def test_a_disk_that_becomes_read_only_is_named_and_hides_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> None:
        with RecordWriter.create(tmp_path / "run", manifest()) as writer:
            write_step(writer, make_step(0))
            with refusing(monkeypatch, errno.EROFS, "unlink"):
                writer.finish_for(RuntimeError("boom"))
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        run()
    assert RunRecord.open(tmp_path / "run").manifest.status == "failed"


@pytest.mark.parametrize("call", ["unlink", "mkdir", "replace"])
def test_a_record_that_cannot_be_written_is_not_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    write_run(tmp_path / "run", make_run(2), status="failed")
    if call == "mkdir":
        (tmp_path / "run" / "steps.jsonl").unlink()
        for path in (tmp_path / "run" / "samples").iterdir():
            path.unlink()
        (tmp_path / "run" / "samples").rmdir()
    with (
        refusing(monkeypatch, errno.EROFS, call),
        pytest.raises(RecordError, match=r"cannot write .*Read-only file system") as caught,
    ):
        RecordWriter.resume(tmp_path / "run")
    assert caught.value.code == "VIME-RECORD-003"


def test_only_a_held_lock_says_that_a_process_still_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    write_run(tmp_path / "run", make_run(1), status="failed")
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", refuse)
        with pytest.raises(RecordError, match="No locks available") as caught:
            RecordWriter.resume(tmp_path / "run")
    assert caught.value.code == "VIME-RECORD-003"
    writer = RecordWriter.resume(tmp_path / "run")
    with pytest.raises(RecordError, match="still runs"):
        RecordWriter.resume(tmp_path / "run")
    writer.finish("failed")


def test_a_line_whose_sync_fails_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = RecordWriter.create(tmp_path / "run", manifest())
    sync = files.sync_directory

    def failing(directory: Path) -> None:
        if (tmp_path / "run" / "steps.jsonl").exists() and directory.name == "run":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(directory)

    with monkeypatch.context() as patch:
        patch.setattr(files, "sync_directory", failing)
        with pytest.raises(RecordError, match="Input/output error"):
            write_step(writer, make_step(0))
    writer.finish("failed")
    found = RunRecord.open(tmp_path / "run")
    assert (found.manifest.steps, found.steps, found.check().findings) == (0, (), ())


@pytest.mark.parametrize(
    ("name", "says"),
    [("x" * 300, "File name too long"), (os.fsdecode(b"a\xff"), "its path is no UTF-8")],
    ids=["too long", "no text"],
)
def test_a_path_that_no_record_has_is_refused_by_name(tmp_path: Path, name: str, says: str) -> None:
    with pytest.raises(RecordError, match=says) as caught:
        RunRecord.open(tmp_path / name)
    assert caught.value.code == "VIME-RECORD-005"
    str(caught.value).encode()


def test_what_may_not_be_read_is_named_and_not_called_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    record = write_run(tmp_path / "run", make_run(1))
    with monkeypatch.context() as patch:
        patch.setattr(seal, "_digest", refuse)
        assert "manifest.json cannot be read: Permission denied" in record.check().findings
    for read in (lambda: RunRecord.open(tmp_path / "run"), lambda: RunRecord(record.directory, record.manifest).steps):
        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_bytes", refuse)
            with pytest.raises(RecordError, match=r"cannot read .*: Permission denied") as caught:
                read()
        assert caught.value.code == "VIME-RECORD-009"


def test_metrics_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    def full(point: str, path: Path) -> None:
        if point == "written":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    sink = open_sink(Options(), tmp_path)
    sink.rewind(0)
    sink.log(0, {"a": 1.0})
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with observed(full), pytest.raises(RecordError, match=r"no space to write .*metrics\.jsonl"):
        sink.log(1, {"a": 2.0})
    sink.close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_lines_that_somebody_took_away_are_missed(tmp_path: Path) -> None:
    writer = RecordWriter.create(tmp_path / "run", manifest())
    write_step(writer, make_step(0))
    (tmp_path / "run" / "steps.jsonl").unlink()
    with pytest.raises(
        RecordError, match=r"steps\.jsonl.* it has 0 bytes, and the run wrote [0-9]+; somebody changed it"
    ):
        write_step(writer, make_step(1))
