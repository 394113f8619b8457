"""The document is right: its script, run as a stranger would run it, agrees with the record and finds an edited one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from synthetic import Step, change_sample, change_step, make_run, with_evaluation, write_run

from vime_core.record.digest import bytes_hash
from vime_core.record.layout import MANIFEST, SAMPLES, STEPS
from vime_core.record.samples import FIELDS
from vime_core.record.schema import FORMAT, Manifest, Seal, StepEntry, UpdateEntry

DOCUMENT = (Path(__file__).parents[4] / "docs" / "record-format.md").read_text()


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT, flags=re.S)
    path = tmp_path_factory.mktemp("stranger") / "check.py"
    path.write_text(code)
    return path


def check(script: Path, directory: Path) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-I", str(script), str(directory)], capture_output=True, text=True, check=False
    )
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout


def test_the_script_imports_neither_vime_nor_torch(script: Path) -> None:
    imported = set(re.findall(r"^(?:import|from) (.*)$", script.read_text(), flags=re.M))
    assert imported == {"array, json, pathlib, sys", "blake3, pyarrow.parquet as pq"}


def long_run() -> list[Step]:
    """More tokens than one block of the hash holds, awkward floats, and a text that is not ASCII."""
    tokens = 3000
    rng = np.random.default_rng(3)
    log_probs = -rng.random(tokens, dtype=np.float32)
    log_probs[:3] = [np.nan, -0.0, -np.inf]
    changes = {
        "response_tokens": tuple(rng.integers(0, 2**31, tokens).tolist()),
        "loss_mask": (True, False) * (tokens // 2),
    }
    steps = make_run(2, updates=2)
    steps = change_sample(steps, 1, 1, rollout_log_probs=log_probs, response_text="λ → 思", **changes)
    rows = steps[1].train_log_probs
    return change_step(steps, 1, train_log_probs=(rows[0], log_probs, *rows[2:]))


def test_the_script_agrees_with_a_record(script: Path, tmp_path: Path) -> None:
    record = write_run(tmp_path / "run", with_evaluation(long_run(), 1))
    assert len(record.seal) == 64
    assert check(script, record.directory) == (0, f"33 digests recomputed, 0 wrong\nseal {record.seal}\n")


def test_the_script_stops_at_a_torn_line(script: Path, tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", make_run(2), status="running").directory
    path = directory / STEPS
    path.write_bytes(path.read_bytes()[:-1])
    assert check(script, directory) == (0, "10 digests recomputed, 0 wrong\n")


@pytest.mark.parametrize(
    ("column", "stage"),
    [("reward", "rewards"), ("seed", "prompts"), ("response_text", "tokens"), ("advantage", "advantages")],
)
def test_the_script_finds_an_edited_record(script: Path, tmp_path: Path, column: str, stage: str) -> None:
    record = write_run(tmp_path / "run", make_run(1))
    path = record.directory / SAMPLES / "step-000000.parquet"
    table = pq.read_table(path)
    values = table[column].to_pylist()
    values[2] = "?" if column == "response_text" else 7
    place = table.schema.get_field_index(column)
    pq.write_table(table.set_column(place, column, pa.array(values, table.schema.field(place).type)), path)
    wrong = f"samples/step-000000.parquet\nstep 0 {stage}"
    assert check(script, record.directory) == (1, f"14 digests recomputed, 2 wrong\n{wrong}\nseal {record.seal}\n")


@pytest.mark.parametrize("file", ["manifest.json", "seal.json"])
def test_the_script_finds_an_edit_that_only_the_seal_shows(script: Path, tmp_path: Path, file: str) -> None:
    directory = write_run(tmp_path / "run", make_run(1)).directory
    text = (directory / file).read_text()
    changed = text.replace("x86_64", "arm64") if file == MANIFEST else re.sub('"digest": ".', '"digest": "x', text)
    (directory / file).write_text(changed)
    assert check(script, directory)[0] == 1


def test_the_script_does_not_pass_an_empty_record(script: Path, tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", [], status="running").directory
    (directory / STEPS).touch()
    assert check(script, directory)[0] == 1


def test_the_tables_name_every_key_and_column() -> None:
    keys = [
        *Manifest.model_fields,
        *StepEntry.model_fields,
        *UpdateEntry.model_fields,
        *Seal.model_fields,
        *(field.name for field in FIELDS),
    ]
    assert [key for key in keys if f"`{key}`" not in DOCUMENT] == []
    assert FORMAT in DOCUMENT
    assert MANIFEST in DOCUMENT


def test_the_hashes_in_the_table_are_right() -> None:
    rows = re.findall(r"^\| (.*?) \| `([0-9a-f]{32})` \|$", DOCUMENT, flags=re.M)
    data = [b"", bytes(range(256)), bytes(n % 251 for n in range(100_000))]
    assert [digest for _, digest in rows] == [bytes_hash(item).hex() for item in data]
