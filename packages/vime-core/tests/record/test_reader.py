from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from synthetic import make_run, make_step, write_run

from vime_core.errors import RecordError
from vime_core.record.reader import RunRecord


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", make_run(2)).directory


def edit_json(path: Path, change: Callable[[dict[str, Any]], object], line: int | None = None) -> None:
    """Change one JSON object of a file, as a person with an editor would."""
    lines = path.read_text().splitlines() if line is not None else [path.read_text()]
    table = json.loads(lines[line or 0])
    change(table)
    lines[line or 0] = json.dumps(table)
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("spoil", "message", "code"),
    [
        (lambda d: (d / "manifest.json").unlink(), "is not a run record: it has no manifest.json", "005"),
        (lambda d: (d / "manifest.json").write_text("{"), "manifest.json' is damaged", "006"),
        (lambda d: (d / "manifest.json").write_bytes(b"\xff\xfe"), "manifest.json' is damaged", "006"),
        (lambda d: (d / "manifest.json").write_text("[]"), "its manifest.json has format None", "005"),
        (lambda d: (d / "manifest.json").write_text('{"format": "pie"}'), "its manifest.json has format 'pie'", "005"),
        (
            lambda d: edit_json(d / "manifest.json", lambda t: t.pop("config")),
            "is damaged: config: Field required",
            "006",
        ),
        (lambda d: edit_json(d / "manifest.json", lambda t: t.update(x=1)), "is damaged: x: Extra inputs", "006"),
        (
            lambda d: edit_json(d / "manifest.json", lambda t: t.update(format="vime-record/1")),
            "is in format 'vime-record/1', and this vime reads 'vime-record/2'",
            "007",
        ),
    ],
)
def test_manifests_that_are_refused(directory: Path, spoil: Callable[[Path], Any], message: str, code: str) -> None:
    spoil(directory)
    with pytest.raises(RecordError) as caught:
        RunRecord.open(directory)
    assert message in caught.value.message
    assert str(directory) in caught.value.message
    assert caught.value.code == f"VIME-RECORD-{code}"


def test_a_path_that_is_no_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="absent' is not a run record: it is no directory"):
        RunRecord.open(tmp_path / "absent")


@pytest.mark.parametrize("status", ["running", "failed"])
@pytest.mark.parametrize("cut", [1, 2, 500])
def test_a_torn_last_line_does_not_count(tmp_path: Path, status: str, cut: int) -> None:
    directory = write_run(tmp_path / "run", make_run(3), status=status).directory
    path = directory / "steps.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    assert [entry.step for entry in RunRecord.open(directory).steps] == [0, 1]


def test_a_torn_last_line_of_a_complete_record_is_damage(directory: Path) -> None:
    path = directory / "steps.jsonl"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(RecordError, match="its last line, 2, is cut off although the record is complete"):
        _ = RunRecord.open(directory).steps


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "line 1: Expecting property name"),
        (b"", "line 1: Expecting value"),
        (b'{"step": 0, "step": 0}', "line 1: the key 'step' comes twice"),
        (b'{"timings": {"generate": NaN}}', "line 1: NaN is no JSON"),
        (b"[" * 100_000, "line 1: "),
        (b"null", "line 1: "),
        (b'{"step": 0}', "line 1: weight_version: Field required"),
        (b"\0" * 40, "line 1: "),
    ],
)
def test_a_damaged_line_is_named(directory: Path, line: bytes, message: str) -> None:
    path = directory / "steps.jsonl"
    path.write_bytes(line + b"\n" + path.read_bytes().split(b"\n", 1)[1])
    with pytest.raises(RecordError) as caught:
        _ = RunRecord.open(directory).steps
    assert f"steps.jsonl' is damaged: {message}" in caught.value.message


def test_no_steps_yet(tmp_path: Path) -> None:
    record = write_run(tmp_path / "run", [], status="running")
    assert record.steps == ()
    assert record.check().holds is None


def test_samples_of_a_step(directory: Path) -> None:
    record = RunRecord.open(directory)
    wanted = make_step(1).samples
    found = record.samples(1)
    assert [sample.key for sample in found] == [sample.key for sample in wanted]
    assert [sample.seed for sample in found] == [sample.seed for sample in wanted]
    assert all(
        a.rollout_log_probs.tobytes() == b.rollout_log_probs.tobytes() for a, b in zip(found, wanted, strict=True)
    )
    with pytest.raises(RecordError, match=r"cannot read .*step-000002\.parquet"):
        record.samples(2)


def test_a_key_that_comes_twice_in_the_manifest(directory: Path) -> None:
    path = directory / "manifest.json"
    path.write_text(path.read_text().replace('"policy":', '"policy": "off/v1", "policy":'))
    with pytest.raises(RecordError, match="the key 'policy' comes twice"):
        RunRecord.open(directory)
