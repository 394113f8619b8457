"""Negative controls: a record that was edited or damaged after it was written is found, at its place."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from synthetic import make_run, write_run

from vime_core.record.reader import RunRecord

Spoil = Callable[[Path], object]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", make_run(3, updates=2)).directory


def edit_line(line: int, change: Callable[[dict[str, Any]], object]) -> Spoil:
    def spoil(directory: Path) -> None:
        path = directory / "steps.jsonl"
        lines = path.read_text().splitlines()
        table = json.loads(lines[line])
        change(table)
        lines[line] = json.dumps(table)
        path.write_text("\n".join(lines) + "\n")

    return spoil


def edit_manifest(change: Callable[[dict[str, Any]], object]) -> Spoil:
    def spoil(directory: Path) -> None:
        path = directory / "manifest.json"
        table = json.loads(path.read_text())
        change(table)
        path.write_text(json.dumps(table))

    return spoil


def edit_samples(change: Callable[[Any], Any]) -> Spoil:
    def spoil(directory: Path) -> None:
        path = directory / "samples" / "step-000001.parquet"
        pq.write_table(change(pq.read_table(path)), path, use_dictionary=False)

    return spoil


def edit_column(name: str, change: Callable[[list[Any]], object]) -> Spoil:
    def edit(table: Any) -> Any:
        values = table.column(name).to_pylist()
        change(values)
        place = table.schema.get_field_index(name)
        return table.set_column(place, table.schema.field(place), pa.array(values, table.schema.field(place).type))

    return edit_samples(edit)


def next_float(values: list[Any]) -> None:
    values[2][1] = float(np.nextafter(np.float32(values[2][1]), np.float32(9)))


def other_hex(text: str) -> str:
    return ("1" if text[0] == "0" else "0") + text[1:]


def drop_last_line(directory: Path) -> None:
    path = directory / "steps.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def drop_middle_line(directory: Path) -> None:
    path = directory / "steps.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0] + lines[2])


def duplicate_line(directory: Path) -> None:
    path = directory / "steps.jsonl"
    path.write_text(path.read_text() + path.read_text().splitlines(keepends=True)[-1])


SAMPLES = "is not that of the stored samples"
CASES: list[tuple[Spoil, str]] = [
    (edit_column("rollout_log_probs", next_float), f"step 1: the digest of rollout log-probs {SAMPLES}"),
    (edit_column("train_log_probs", next_float), f"step 1: update 1: the digest of train log-probs {SAMPLES}"),
    (edit_column("advantage", lambda v: v.__setitem__(0, -0.0)), f"step 1: the digest of advantages {SAMPLES}"),
    (edit_column("reward", lambda v: v.__setitem__(0, 0.5)), f"step 1: the digest of rewards {SAMPLES}"),
    (edit_column("prompt_tokens", lambda v: v[0].append(1)), f"step 1: the digest of prompts {SAMPLES}"),
    (edit_column("seed", lambda v: v.__setitem__(0, 5)), f"step 1: the digest of prompts {SAMPLES}"),
    (edit_column("response_text", lambda v: v.__setitem__(0, "")), f"step 1: the digest of tokens {SAMPLES}"),
    (
        edit_column("update", lambda v: v.__setitem__(3, 0)),
        f"step 1: update 0: the digest of train log-probs {SAMPLES}",
    ),
    (edit_column("update", lambda v: v.__setitem__(3, 7)), "step 1: samples of update 7, which the step does not list"),
    (edit_samples(lambda t: t.slice(0, 3)), f"step 1: the digest of prompts {SAMPLES}"),
    (edit_samples(lambda t: pa.concat_tables([t, t.slice(3, 1)])), "step 1: sample (3, 1) comes twice"),
    (edit_samples(lambda t: t.take([1, 0, 2, 3])), "step 1: sample (2, 0) stands after (2, 1)"),
    (lambda d: (d / "samples" / "step-000001.parquet").unlink(), "step 1: cannot read"),
    (lambda d: (d / "samples" / "step-000001.parquet").write_bytes(b"PAR1"), "step 1: cannot read"),
    (
        lambda d: shutil.copy(d / "samples/step-000000.parquet", d / "samples/step-000001.parquet"),
        "step 1: the digest of prompts",
    ),
    (lambda d: (d / "samples" / "step-000009.parquet").touch(), "samples/step-000009.parquet belongs to no step"),
    (
        edit_line(2, lambda t: t["weights"].update({"norm.weight": other_hex(t["weights"]["norm.weight"])})),
        "step 2: weights: the root is not that of the 3 stored digests",
    ),
    (edit_line(2, lambda t: t["weights"].pop("norm.weight")), "step 2: weights: the root is not that of the 2"),
    (
        edit_line(0, lambda t: t["updates"][1]["gradients"].clear()),
        "step 0: update 1: gradients: the root is not that of the 0",
    ),
    (edit_line(0, lambda t: t.update(optimizer_root="0" * 64)), "step 0: optimizer: the root is not"),
    (edit_line(0, lambda t: t.update(rewards="0" * 64)), f"step 0: the digest of rewards {SAMPLES}"),
    (edit_line(0, lambda t: t["updates"][0].update(loss="0.125")), "step 0: update 0: loss is '0.125', not a number"),
    (
        edit_line(0, lambda t: t["updates"][0].update(loss=(9.0).hex())),
        "steps.jsonl: its digest is not the one in the manifest",
    ),
    (edit_line(0, lambda t: t.update(timings={})), "steps.jsonl: its digest is not the one in the manifest"),
    (drop_last_line, "steps.jsonl: the manifest counts 3 steps, 2 are there"),
    (drop_middle_line, "step 0 is followed by step 2"),
    (duplicate_line, "step 2 is followed by step 2"),
    (
        edit_manifest(lambda t: t["initial_weights"].update({"norm.weight": "0" * 64})),
        "manifest: initial weights: the root is not that of the 3",
    ),
    (edit_manifest(lambda t: t.update(initial_weights={})), "manifest: initial weights: the root is not that of the 0"),
    (edit_manifest(lambda t: t.update(steps=2)), "steps.jsonl: the manifest counts 2 steps, 3 are there"),
]


def test_an_untouched_record_holds(directory: Path) -> None:
    check = RunRecord.open(directory).check()
    assert check.findings == ()
    assert check.holds is True
    assert (check.steps, check.samples) == (3, 12)


@pytest.mark.parametrize(("spoil", "finding"), CASES, ids=[f"{i}" for i in range(len(CASES))])
def test_an_edited_record_is_found(directory: Path, spoil: Spoil, finding: str) -> None:
    spoil(directory)
    check = RunRecord.open(directory).check()
    assert check.holds is False
    assert any(finding in found for found in check.findings), check.findings


def test_a_record_without_steps_is_not_sound_but_unchecked(tmp_path: Path) -> None:
    assert write_run(tmp_path / "run", []).check().holds is None


def test_a_record_that_still_runs_may_have_samples_ahead_of_their_line(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", make_run(2), status="running").directory
    drop_last_line(directory)
    assert RunRecord.open(directory).check().holds is True
