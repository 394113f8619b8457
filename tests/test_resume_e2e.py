"""On the real trainer and engine: killed and resumed is never stopped, and what a resume forgets is found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import no_traceback, vime

pytestmark = [pytest.mark.slow, pytest.mark.engine]
SETS = ["--set", "trainer.warmup_steps=6", "--set", "plugins.modules=['forget_warmup']"]


def test_eight_steps_are_three_a_kill_and_five(smoke: Path, tmp_path: Path) -> None:
    ran = vime("verify", "resume", smoke, "--directory", tmp_path / "records", "--json", *SETS)
    no_traceback(ran)
    assert ran.code == 0, ran.text
    assert ran.json["coverage"]["steps"] == 8
    assert "went on from the checkpoint after step 3" in ran.json["sentence"]
    manifest = json.loads((tmp_path / "records" / "killed" / "manifest.json").read_text())
    (resumed,) = manifest["resumed"]
    first = {process["role"]: process["pid"] for process in manifest["processes"]}
    assert {process["role"] for process in resumed["processes"]} == {*first} == {"trainer", "rollout"}
    assert all(first[process["role"]] != process["pid"] for process in resumed["processes"])
    _refuses_other_processes(tmp_path / "records" / "killed")


def _refuses_other_processes(record: Path) -> None:
    """A variable that chooses kernels, and no step was recorded after the checkpoint: nothing else would find it."""
    before = (record / "steps.jsonl").read_bytes()
    ran = vime("run", "--resume", record, "--set", "run.steps=9", env={"ONEDNN_MAX_CPU_ISA": "SSE41"})
    no_traceback(ran)
    assert ran.code == 2, ran.text
    assert "VIME-CONFIG-017" in ran.text
    assert "ONEDNN_MAX_CPU_ISA" in ran.text
    assert (record / "steps.jsonl").read_bytes() == before


def test_a_forgotten_scheduler_does_not_hold(smoke: Path, tmp_path: Path) -> None:
    directory = tmp_path / "records"
    ran = vime(
        *("verify", "resume", smoke, "--directory", directory, "--steps", "8", "--kill-after", "1", *SETS),
        env={"VIME_TEST_FORGET": "1"},
    )
    no_traceback(ran)
    assert ran.code == 1, ran.text
    assert "Resume does not hold" in ran.out
    assert "updates" in ran.out or "learning_rate" in ran.out or "learning rate" in ran.out
