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
from blake3 import blake3
from synthetic import CONFIG, change_sample, make_run, manifest, with_evaluation, write_run, write_step

from vime_core.errors import RecordError
from vime_core.record.check import RecordCheck
from vime_core.record.reader import RunRecord
from vime_core.record.seal import write_seal
from vime_core.record.writer import RecordWriter

Spoil = Callable[[Path], object]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    directory = tmp_path / "run"
    writer = RecordWriter.create(directory, manifest())
    for step in with_evaluation(make_run(3, updates=2), 1):
        write_step(writer, step)
    (directory / "metrics.jsonl").write_text('{"step": 0, "reward": NaN}\n')
    (directory / "checkpoints").mkdir()
    (directory / "checkpoints" / "large").write_bytes(b"not sealed")
    (directory / "engine.log").write_text("not sealed")
    writer.finish("complete")
    return directory


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


def edit_seal(change: Callable[[dict[str, Any]], object]) -> Spoil:
    def spoil(directory: Path) -> None:
        path = directory / "seal.json"
        table = json.loads(path.read_text())
        change(table)
        path.write_text(json.dumps(table))

    return spoil


def edit_samples(change: Callable[[Any], Any], file: str = "samples/step-000001.parquet") -> Spoil:
    def spoil(directory: Path) -> None:
        path = directory / file
        pq.write_table(change(pq.read_table(path)), path, use_dictionary=False)

    return spoil


def edit_column(name: str, change: Callable[[list[Any]], object]) -> Spoil:
    return edit_parquet("samples/step-000001.parquet", name, change)


def edit_parquet(file: str, name: str, change: Callable[[list[Any]], object]) -> Spoil:
    def edit(table: Any) -> Any:
        values = table.column(name).to_pylist()
        change(values)
        place = table.schema.get_field_index(name)
        return table.set_column(place, table.schema.field(place), pa.array(values, table.schema.field(place).type))

    return edit_samples(edit, file)


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
    (
        edit_line(0, lambda t: t.update(reference_log_probs="0" * 64)),
        "step 0: the digest of reference log-probs is not that of the stored samples",
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


CASES += [
    (edit_manifest(lambda t: t.update(processes=[])), "manifest.json is not what was sealed"),
    (edit_manifest(lambda t: t["platform"].update(machine="arm64")), "manifest.json is not what was sealed"),
    (lambda d: (d / "seal.json").unlink(), "seal.json is missing, although the record is complete"),
    (edit_seal(lambda t: t.update(digest="0" * 64)), "seal.json: its digest is not that of the 7 files"),
    (edit_seal(lambda t: t["files"].pop("steps.jsonl")), "steps.jsonl was not there when the record was sealed"),
    (edit_seal(lambda t: t["files"].update(other="0" * 64)), "other is missing, although it was sealed"),
    (edit_seal(lambda t: t.update(format="vime-record/9")), "seal.json: its format is 'vime-record/9'"),
    (lambda d: (d / "metrics.jsonl").write_text("{}\n"), "metrics.jsonl is not what was sealed"),
    (lambda d: (d / "metrics.jsonl").write_text('{"a": 1, "a": 2}\n'), "the key 'a' comes twice"),
    (lambda d: (d / "metrics.jsonl").write_text('{"step": [1]}\n'), "metrics.jsonl: a line's step is [1]"),
    (lambda d: (d / "metrics.jsonl").write_text('{"step": true}\n'), "metrics.jsonl: a line's step is True"),
    (
        edit_seal(lambda t: t["files"].update({"../a": "0" * 64})),
        "seal.json lists '../a', which is no file",
    ),
    (
        edit_seal(lambda t: t["files"].update({"/etc/a": "0" * 64})),
        "seal.json lists '/etc/a', which is no file",
    ),
    (lambda d: (d / "taps").mkdir() or (d / "taps" / "x").touch(), "taps/x was not there when the record was sealed"),
    (
        edit_parquet("evaluation/step-000001.parquet", "response_text", lambda v: v.__setitem__(0, "!")),
        "step 1: evaluation: the digest of tokens is not that of the stored responses",
    ),
    (
        edit_parquet("evaluation/step-000001.parquet", "reward", lambda v: v.__setitem__(0, 0.5)),
        "step 1: evaluation: the digest of rewards is not",
    ),
    (
        lambda d: (d / "evaluation/step-000001.parquet").unlink(),
        "step 1: the line has digests of an evaluation, but no response is stored",
    ),
    (edit_line(1, lambda t: t.update(evaluation={})), "step 1: evaluation: the digest of prompts is not"),
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


def test_steps_without_samples_prove_nothing() -> None:
    assert RecordCheck((), 1, 1).holds is True
    assert RecordCheck((), 1, 0).holds is None
    assert RecordCheck((), 0, 0).holds is None


def test_a_record_without_steps_is_not_sound_but_unchecked(tmp_path: Path) -> None:
    assert write_run(tmp_path / "run", []).check().holds is None


def test_a_record_that_still_runs_may_have_samples_ahead_of_their_line(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", make_run(2), status="running").directory
    drop_last_line(directory)
    assert RunRecord.open(directory).check().holds is True


def sealed_again(directory: Path, spoil: Spoil) -> tuple[str, ...]:
    """What a check finds when somebody edits a record and makes manifest and seal agree with it."""
    spoil(directory)
    lines = (directory / "steps.jsonl").read_bytes()
    edit_manifest(lambda t: t.update(steps=lines.count(b"\n"), steps_digest=blake3(lines).hexdigest()))(directory)
    write_seal(directory, (directory / "manifest.json").read_bytes())
    return RunRecord.open(directory).check().findings


def drop_step_zero(directory: Path) -> None:
    path = directory / "steps.jsonl"
    path.write_bytes(path.read_bytes().split(b"\n", 1)[1])
    (directory / "samples" / "step-000000.parquet").unlink()


def with_config(**sections: dict[str, Any]) -> Spoil:
    return edit_manifest(
        lambda t: t["config"].update({k: {**t["config"].get(k, {}), **v} for k, v in sections.items()})
    )


RESEALED: list[tuple[Spoil, str]] = [
    (drop_step_zero, "the steps begin with step 1; step 0 is missing"),
    (drop_step_zero, "the first step generated with weight version 1, not 0"),
    (
        edit_line(1, lambda t: t.update(weight_version=7)),
        "step 1: it generated with weight version 7, but holds samples of version 1",
    ),
    (edit_line(1, lambda t: t.update(weight_version=7)), "step 1 generated with weight version 7, the step before it"),
    (with_config(run={"steps": 4}), "3 steps are there, where 4 were configured"),
    (
        with_config(sampling={"prompts_per_step": 3, "samples_per_prompt": 2}),
        "step 0: it holds 4 samples of 2 prompts, where the configuration promises 2 of each of 3",
    ),
    (
        with_config(sampling={"prompts_per_step": 4, "samples_per_prompt": 1}),
        "step 0: it holds 4 samples of 2 prompts, where the configuration promises 1 of each of 4",
    ),
    (with_config(evaluation={"every": 2}), "step 0: an evaluation was due, but none is recorded"),
]


@pytest.mark.parametrize(("spoil", "finding"), RESEALED, ids=[f"{i}" for i in range(len(RESEALED))])
def test_what_a_new_seal_does_not_hide(directory: Path, spoil: Spoil, finding: str) -> None:
    findings = sealed_again(directory, spoil)
    assert any(finding in found for found in findings), findings
    assert not any("sealed" in found for found in findings)


@pytest.mark.parametrize("section", ["run", "evaluation", "sampling"])
@pytest.mark.parametrize("wrong", [None, "x", [], 3])
def test_a_section_that_is_no_table_is_refused_by_name(directory: Path, section: str, wrong: object) -> None:
    with pytest.raises(RecordError, match=rf"manifest\.json' is damaged: config\.{section}: Input should be"):
        sealed_again(directory, edit_manifest(lambda t: t["config"].update({section: wrong})))


def test_what_only_the_digest_of_the_seal_shows(directory: Path) -> None:
    """The limit that the format's page states: consistent edits, sealed again, agree with themselves."""
    before = RunRecord.open(directory).seal
    assert sealed_again(directory, edit_manifest(lambda t: t["platform"].update(machine="arm64"))) == ()
    assert RunRecord.open(directory).seal != before


def test_checkpoints_and_logs_may_be_removed(directory: Path) -> None:
    shutil.rmtree(directory / "checkpoints")
    (directory / "engine.log").unlink()
    assert RunRecord.open(directory).check().holds is True


def test_a_sample_of_another_version_is_found(tmp_path: Path) -> None:
    record = write_run(tmp_path / "run", change_sample(make_run(2), 1, 2, weight_version=0), config=CONFIG)
    assert record.check().findings == ("step 1: it generated with weight version 1, but holds samples of version 0",)


def test_as_many_samples_of_each_prompt_as_promised(tmp_path: Path) -> None:
    config = {**CONFIG, "sampling": {"prompts_per_step": 2, "samples_per_prompt": 2}}
    assert write_run(tmp_path / "even", make_run(2), config=config).check().holds is True
    uneven = change_sample(make_run(2), 1, 2, prompt_index=2, sample_index=2)
    (finding,) = write_run(tmp_path / "uneven", uneven, config=config).check().findings
    assert finding == "step 1: it holds 1 to 3 samples of each of 2 prompts, where the configuration promises 2"
