"""The main job on real engines: a recorded run, twice, bit for bit the same; and one flipped bit is found and named."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from command import Ran, no_traceback, vime
from flip_one_bit import TENSOR

pytestmark = [pytest.mark.slow, pytest.mark.engine]


@dataclass(frozen=True)
class Repeated:
    """Two runs of the smoke configuration and their verdict."""

    ran: Ran
    first: Path
    second: Path


EVALUATION = [f"evaluation.{one}" for one in ("every=1", "prompts=2", "max_tokens=16")]
SETS = [
    *(part for one in EVALUATION for part in ("--set", one)),
    "--set",
    "run.checkpoint_every=1",
    "--set",
    "plugins.modules=['flip_one_bit']",
]


@pytest.fixture(scope="module")
def repeated(smoke: Path, tmp_path_factory: pytest.TempPathFactory) -> Repeated:
    directory = tmp_path_factory.mktemp("repeat") / "records"
    ran = vime("verify", "repeat", smoke, "--directory", directory, "--json", *SETS)
    return Repeated(ran, directory / "first", directory / "second")


@pytest.fixture(scope="module")
def flipped(smoke: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    record = tmp_path_factory.mktemp("flipped") / "record"
    ran = vime("run", smoke, "--output", record, *SETS, env={"VIME_TEST_FLIP": "1"})
    assert ran.code == 0, ran.text
    return record


def test_the_same_run_twice_is_the_same(repeated: Repeated) -> None:
    assert repeated.ran.code == 0, repeated.ran.text
    verdict = repeated.ran.json
    assert verdict["holds"] is True
    assert verdict["unequal"] == 0
    coverage = verdict["coverage"]
    assert coverage["steps"] == 2
    assert coverage["samples"] == 2 * (16 + 2)  # of training and of evaluation
    assert 36 * 12 < coverage["tokens"] <= 36 * 16
    assert coverage["tensors"] > 30


def test_the_record_reads_without_vime(repeated: Repeated) -> None:
    manifest = json.loads((repeated.first / "manifest.json").read_text())
    assert manifest["status"] == "complete"
    assert manifest["policy"] == "reproducible/v1"
    roles = {process["role"] for process in manifest["processes"]}
    assert roles == {"trainer", "rollout"}
    trainer = next(p for p in manifest["processes"] if p["role"] == "trainer")
    assert trainer["environment"]["NCCL_ALGO"] == "Ring"
    rollout = next(p for p in manifest["processes"] if p["role"] == "rollout")
    assert rollout["environment"]["PYTHONHASHSEED"] == "0"
    assert rollout["pid"] != trainer["pid"]
    steps = [json.loads(line) for line in (repeated.first / "steps.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [0, 1]
    assert [step["weight_version"] for step in steps] == [0, 1]
    assert len(set(steps[0]["weights"].values()) & set(steps[1]["weights"].values())) == 0


def test_equal_runs_report_equal_environments(repeated: Repeated) -> None:
    manifests = [json.loads((record / "manifest.json").read_text()) for record in (repeated.first, repeated.second)]
    first, second = ([p["environment"] for p in manifest["processes"]] for manifest in manifests)
    assert first == second
    assert all(environment["OMP_NUM_THREADS"] == "1" for environment in first)


def test_checkpoints_are_whole(repeated: Repeated) -> None:
    checkpoints = sorted(path.name for path in (repeated.first / "checkpoints").iterdir())
    assert checkpoints == ["step-000001", "step-000002"]


def test_one_flipped_weight_bit_does_not_hold(repeated: Repeated, flipped: Path) -> None:
    ran = vime("verify", "repeat", repeated.first, flipped)
    no_traceback(ran)
    assert ran.code == 1, ran.text
    assert TENSOR in ran.out


def test_the_difference_is_named_by_step_and_tensor(repeated: Repeated, flipped: Path) -> None:
    ran = vime("diff", repeated.first, flipped, "--json")
    assert ran.code == 1, ran.text
    difference = ran.json["difference"]
    assert (difference["step"], difference["stage"], difference["tensor"]) == (1, "weights", TENSOR)
    said = vime("diff", repeated.first, flipped)
    no_traceback(said)
    assert TENSOR in said.out
    assert "Step 1, weights" in said.out


def test_evaluations_are_recorded_and_compared(repeated: Repeated) -> None:
    columns = pq.read_table(repeated.first / "evaluation" / "step-000000.parquet")
    assert columns.num_rows == 2
    assert all(columns["response_text"].to_pylist())
    step = json.loads((repeated.first / "steps.jsonl").read_text().splitlines()[0])
    assert sorted(step["evaluation"]) == ["prompts", "rewards", "rollout_log_probs", "tokens"]


def copied(repeated: Repeated, to: Path) -> Path:
    shutil.copytree(repeated.second, to)
    return to


def edit_manifest(record: Path, **changes: object) -> None:
    path = record / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_record_that_still_runs_is_not_called_equal(repeated: Repeated, tmp_path: Path) -> None:
    running = copied(repeated, tmp_path / "running")
    edit_manifest(running, status="running", steps=0, steps_digest="")
    (running / "seal.json").unlink()
    ran = vime("diff", repeated.first, running)
    assert ran.code == 3, ran.text
    assert "No digest differs in the 2 steps that both records hold, but the second record is running" in ran.out
    assert vime("diff", repeated.first, running, "--json").json["equal"] is None


def test_an_edited_list_of_processes_is_found(repeated: Repeated, tmp_path: Path) -> None:
    edited = copied(repeated, tmp_path / "edited")
    edit_manifest(edited, processes=[])
    for command in (("diff",), ("verify", "repeat")):
        ran = vime(*command, repeated.first, edited)
        assert ran.code == 1, ran.text
        assert "manifest.json is not what was sealed" in ran.out


def test_equal_records_have_no_difference(repeated: Repeated) -> None:
    ran = vime("diff", repeated.first, repeated.second, "--json")
    assert (ran.code, ran.json["equal"]) == (0, True)
