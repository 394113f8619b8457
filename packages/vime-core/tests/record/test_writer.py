from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from synthetic import entry_of, make_run, make_step, manifest, write_run, write_step

from vime_core.errors import Interrupted, RecordError
from vime_core.interruption import interrupt
from vime_core.record import files
from vime_core.record import writer as writer_module
from vime_core.record.points import observed
from vime_core.record.reader import RunRecord
from vime_core.record.writer import RecordWriter, refuse_existing


def test_a_record_round_trips(tmp_path: Path) -> None:
    steps = make_run(3, updates=2)
    record = write_run(tmp_path / "a" / "b" / "run", steps)
    assert record.manifest.status == "complete"
    assert record.manifest.steps == 3
    assert len(record.manifest.run_id) == 32
    assert record.steps == tuple(entry_of(step) for step in steps)
    stored = record.step_samples(1)
    assert [s.key for s in stored.samples] == [s.key for s in steps[1].samples]
    assert [a.tobytes() for a in stored.train_log_probs] == [a.tobytes() for a in steps[1].train_log_probs]
    assert stored.advantages.tobytes() == steps[1].advantages.tobytes()
    assert stored.updates == (0, 0, 1, 1)
    assert record.check().holds is True
    assert sorted(p.name for p in (tmp_path / "a/b/run").rglob("*")) == [
        "manifest.json",
        "samples",
        "seal.json",
        "step-000000.parquet",
        "step-000001.parquet",
        "step-000002.parquet",
        "steps.jsonl",
    ]


@pytest.mark.parametrize("what", ["directory", "file", "dangling link"])
def test_nothing_is_overwritten(tmp_path: Path, what: str) -> None:
    path = tmp_path / "run"
    {"directory": path.mkdir, "file": path.touch, "dangling link": lambda: path.symlink_to("nowhere")}[what]()
    for refuse in (refuse_existing, lambda p: RecordWriter.create(p, manifest())):
        with pytest.raises(RecordError, match="exists already") as caught:
            refuse(path)
        assert caught.value.code == "VIME-RECORD-001"
        assert str(path) in caught.value.message
        assert "run.output" in caught.value.remedy


def test_a_parent_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RecordError, match=r"cannot write .*file/run.*: (File exists|Not a directory)"):
        RecordWriter.create(tmp_path / "file" / "run", manifest())


def test_samples_are_on_disk_before_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    writer = RecordWriter.create(tmp_path / "run", manifest())
    fsync, replace_file = os.fsync, os.replace
    monkeypatch.setattr(files.os, "fsync", lambda fd: (events.append("sync " + name_of(fd)), fsync(fd)))
    monkeypatch.setattr(files.os, "replace", lambda a, b: (events.append(f"name {Path(b).name}"), replace_file(a, b)))
    write_step(writer, make_step(0))
    assert events == [
        "sync .step-000000.parquet.unfinished",
        "name step-000000.parquet",
        "sync samples",
        "sync steps.jsonl",
        "sync run",
    ]


def name_of(descriptor: int) -> str:
    return Path(os.readlink(f"/proc/self/fd/{descriptor}")).name


def test_only_digests_of_what_is_written_are_accepted(tmp_path: Path) -> None:
    writer = RecordWriter.create(tmp_path / "run", manifest())
    step, other = make_step(0), make_step(1)
    cases: list[tuple[dict[str, object], str]] = [
        ({"tokens": "0" * 64}, "the digest of tokens is not that of the stored samples"),
        ({"rollout_log_probs": "0" * 64}, "the digest of rollout log-probs"),
        ({"weights_root": "0" * 64}, "weights: the root is not that of the 3 stored digests"),
        ({"optimizer": {"a": "no digest"}}, "optimizer: digest of 'a' is 'no digest'"),
        ({"metrics": {"reward": "0.5"}}, "reward is '0.5', not a number as float.hex writes it"),
        ({"updates": entry_of(other).updates}, "update 0: the digest of train log-probs"),
        ({"updates": ()}, r"its updates trained on \[\] samples, but 4 were given"),
    ]
    for changes, message in cases:
        entry = entry_of(step).model_copy(update=changes)
        with pytest.raises(RecordError, match=message):
            writer.write_step(entry, step.samples, step.train_log_probs, step.advantages)
    write_step(writer, step)
    assert len(RunRecord.open(tmp_path / "run").steps) == 1


def test_steps_count_up_and_a_closed_record_stays_closed(tmp_path: Path) -> None:
    writer = RecordWriter.create(tmp_path / "run", manifest())
    write_step(writer, make_step(4))
    for wrong in (4, 6, 3):
        with pytest.raises(RecordError, match=f"step {wrong} comes where step 5 belongs"):
            write_step(writer, make_step(wrong))
    write_step(writer, make_step(5))
    writer.finish("complete")
    for attempt in (lambda: write_step(writer, make_step(6)), lambda: writer.finish("failed")):
        with pytest.raises(RecordError, match="is closed as complete"):
            attempt()
    assert writer.last_weights_root == entry_of(make_step(5)).weights_root


def test_updates_must_cover_the_samples(tmp_path: Path) -> None:
    step = make_step(0, updates=2)
    entry = entry_of(step)
    short = entry.model_copy(update={"updates": (entry.updates[0], entry.updates[1].model_copy(update={"samples": 1}))})
    with pytest.raises(RecordError, match=r"its updates trained on \[2, 1\] samples, but 4 were given"):
        RecordWriter.create(tmp_path / "run", manifest()).write_step(
            short, step.samples, step.train_log_probs, step.advantages
        )


def fail_after_a_step(directory: Path) -> None:
    with RecordWriter.create(directory, manifest()) as writer:
        write_step(writer, make_step(0))
        raise RuntimeError("boom")


def test_the_block_says_how_the_run_ended(tmp_path: Path) -> None:
    with RecordWriter.create(tmp_path / "good", manifest()) as writer:
        writer.finish("complete")
    with pytest.raises(RuntimeError, match="boom"):
        fail_after_a_step(tmp_path / "bad")
    with RecordWriter.create(tmp_path / "silent", manifest()):
        pass
    found = {name: RunRecord.open(tmp_path / name).manifest for name in ("good", "bad", "silent")}
    assert [found[name].status for name in found] == ["complete", "failed", "failed"]
    assert found["bad"].error == "RuntimeError: boom"
    assert found["bad"].steps == 1
    assert RunRecord.open(tmp_path / "bad").check().holds is True


def test_manifest_is_replaced_whole_and_validated(tmp_path: Path) -> None:
    writer = RecordWriter.create(tmp_path / "run", manifest())
    with pytest.raises(ValueError, match="colour"):
        writer.update_manifest(colour="blue")
    writer.update_manifest(contract="dense/v1")
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["contract"] == "dense/v1"


def no_space(*_: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def half_then_no_space(write: Callable[[int, bytes], int]) -> Callable[[int, bytes], int]:
    calls: list[int] = []

    def limited(descriptor: int, data: bytes) -> int:
        calls.append(1)
        return write(descriptor, bytes(data)[: len(data) // 2]) if len(calls) == 1 else no_space()

    return limited


@pytest.mark.parametrize("seam", ["write", "half", "fsync"])
@pytest.mark.parametrize("file", ["step-000001.parquet", "steps.jsonl"])
def test_a_full_disk_leaves_the_finished_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seam: str, file: str
) -> None:
    writer = RecordWriter.create(tmp_path / "run", manifest())
    write_step(writer, make_step(0))
    before = (tmp_path / "run" / "steps.jsonl").read_bytes()
    with monkeypatch.context() as patch:
        fail_for(patch, seam, file)
        with pytest.raises(RecordError, match=rf"no space to write .*{file}.*: \d+ bytes are free") as caught:
            write_step(writer, make_step(1))
    assert caught.value.code == "VIME-RECORD-002"
    assert (tmp_path / "run" / "steps.jsonl").read_bytes() == before
    assert not list((tmp_path / "run").rglob("*.unfinished"))
    survivor = RunRecord.open(tmp_path / "run")
    assert len(survivor.steps) == 1
    assert survivor.check().holds is True
    write_step(writer, make_step(1))  # space was made
    writer.finish("complete")
    assert RunRecord.open(tmp_path / "run").check().findings == ()


def fail_for(patch: pytest.MonkeyPatch, seam: str, file: str) -> None:
    """Let the seam fail for one file only."""
    real = {"write": os.write, "half": os.write, "fsync": os.fsync}[seam]
    failing = half_then_no_space(os.write) if seam == "half" else no_space

    def call(descriptor: int, *rest: bytes) -> int | None:
        return (failing if file in name_of(descriptor) else real)(descriptor, *rest)

    patch.setattr(files.os, "fsync" if seam == "fsync" else "write", call)


def test_a_full_disk_does_not_hide_the_first_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finish = RecordWriter.finish
    monkeypatch.setattr(
        RecordWriter, "finish", lambda *_: (monkeypatch.setattr(files.os, "write", no_space), finish(*_))
    )
    with pytest.raises(RuntimeError, match="boom") as caught:
        fail_after_a_step(tmp_path / "run")
    assert "status could not be written: no space" in caught.value.__notes__[0]
    assert RunRecord.open(tmp_path / "run").manifest.status == "running"


def test_other_failures_name_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    writer = RecordWriter.create(tmp_path / "run", manifest())
    monkeypatch.setattr(files.os, "open", denied)
    with pytest.raises(RecordError, match=r"cannot write .*step-000000.parquet.*: Permission denied"):
        write_step(writer, make_step(0))


def test_a_killed_process_leaves_a_valid_record(tmp_path: Path) -> None:
    code = f"""
import importlib.util, os, pathlib, sys
spec = importlib.util.spec_from_file_location("synthetic", {str(Path(__file__).with_name("synthetic.py"))!r})
synthetic = importlib.util.module_from_spec(spec); sys.modules["synthetic"] = synthetic
spec.loader.exec_module(synthetic)
from vime_core.interruption import interrupt
from vime_core.record import files
from vime_core.record import writer as writer_module, writer
w = writer.RecordWriter.create(pathlib.Path({str(tmp_path / "run")!r}), synthetic.manifest())
synthetic.write_step(w, synthetic.make_step(0))
real = os.write
def torn(descriptor, data):
    if "steps.jsonl" in os.readlink(f"/proc/self/fd/{{descriptor}}"):
        real(descriptor, bytes(data)[:200]); os.kill(os.getpid(), 9)
    return real(descriptor, data)
files.os.write = torn
synthetic.write_step(w, synthetic.make_step(1))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == -9, done.stderr
    record = RunRecord.open(tmp_path / "run")
    assert (tmp_path / "run" / "steps.jsonl").read_bytes()[-1:] != b"\n"
    assert record.manifest.status == "running"
    assert [entry.step for entry in record.steps] == [0]
    assert record.check().holds is True


def test_samples_given_in_another_order_are_refused(tmp_path: Path) -> None:
    step = make_step(0)
    with pytest.raises(RecordError, match="stands after"):
        RecordWriter.create(tmp_path / "run", manifest()).write_step(
            entry_of(step), step.samples[::-1], step.train_log_probs, step.advantages
        )


def test_an_interruption_is_no_failure(tmp_path: Path) -> None:
    def interrupted() -> None:
        with RecordWriter.create(tmp_path / "run", manifest()) as writer:
            write_step(writer, make_step(0))
            raise Interrupted("SIGTERM", 143)

    with pytest.raises(Interrupted) as caught:
        interrupted()
    found = RunRecord.open(tmp_path / "run").manifest
    assert (found.status, found.steps, found.error) == ("interrupted", 1, "Interrupted: interrupted by SIGTERM")
    command = f"vime run --resume {tmp_path / 'run'}"
    kept = f"1 steps are kept in {str(tmp_path / 'run')!r}, with status 'interrupted'"
    assert caught.value.__notes__ == [f"{kept}; go on with: {command}"]
    with pytest.raises(RecordError, match="exists already") as existing:
        refuse_existing(tmp_path / "run")
    assert existing.value.remedy.startswith(f"Go on with it: {command}. Or choose another run.output,")
    (tmp_path / "run" / "manifest.json").write_bytes(b"{")
    with pytest.raises(RecordError, match="exists already") as existing:
        refuse_existing(tmp_path / "run")
    assert "--resume" not in existing.value.remedy


def test_an_interruption_before_there_is_a_record_leaves_its_place_free(tmp_path: Path) -> None:
    def interrupted(point: str, path: Path) -> None:
        if path.name == ".manifest.json.unfinished":
            interrupt(signal.SIGTERM)

    with observed(interrupted), pytest.raises(Interrupted):
        RecordWriter.create(tmp_path / "run", manifest())
    assert not (tmp_path / "run").exists()


def test_an_interruption_after_the_end_is_told_that_the_record_is_complete(tmp_path: Path) -> None:
    def interrupted() -> None:
        with RecordWriter.create(tmp_path / "run", manifest()) as writer:
            write_step(writer, make_step(0))
            writer.finish("complete")
            raise Interrupted("SIGTERM", 143)

    with pytest.raises(Interrupted) as caught:
        interrupted()
    assert caught.value.__notes__ == [f"the record {str(tmp_path / 'run')!r} is complete: 1 steps"]
    assert RunRecord.open(tmp_path / "run").manifest.status == "complete"


def test_a_full_disk_still_takes_the_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nothing but the reserve were left: writing works only once it is given up."""
    write = os.write
    reserve = tmp_path / "run" / ".reserve"

    def full(descriptor: int, data: bytes) -> int:
        return no_space() if reserve.exists() else write(descriptor, data)

    writer = RecordWriter.create(tmp_path / "run", manifest())
    assert reserve.stat().st_blocks * 512 >= 2 * (tmp_path / "run" / "manifest.json").stat().st_size
    monkeypatch.setattr(files.os, "write", full)
    with pytest.raises(RecordError), writer:
        write_step(writer, make_step(0))
    found = RunRecord.open(tmp_path / "run").manifest
    assert found.status == "failed"
    assert "no space" in found.error
    assert not reserve.exists()


def test_a_signal_waits_until_the_step_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal comes when the step's line is on disk and the writer has not counted it."""

    def append_and_interrupt(path: Path, data: bytes, size: int) -> None:
        append_whole(path, data, size)
        interrupt(signal.SIGTERM)

    append_whole = writer_module.append_whole
    monkeypatch.setattr(writer_module, "append_whole", append_and_interrupt)
    writer = RecordWriter.create(tmp_path / "run", manifest())
    with pytest.raises(Interrupted, match="SIGTERM"), writer:
        write_step(writer, make_step(0))
    found = RunRecord.open(tmp_path / "run")
    assert (found.manifest.status, found.manifest.steps, found.check().findings) == ("interrupted", 1, ())
    with pytest.raises(Interrupted) as caught:
        interrupt(signal.SIGINT)
    assert caught.value.exit_code == 130
