"""A fault at one operation of one layer, in one of two runs: the replay names step, layer and operation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import ROOT, no_traceback, vime

pytestmark = [pytest.mark.slow, pytest.mark.engine]

ALIGNED = ROOT / "configs" / "aligned-smoke.toml"
SETS = [
    *("plugins.modules=['other_epsilon']", "sampling.prompts_per_step=2", "sampling.samples_per_prompt=2"),
    *("sampling.max_tokens=4", "rollout.context_length=128", "run.sinks=[]"),
]


def run(name: str, output: Path, *sets: str) -> Path:
    """A run under its contract; the faulty one ends with exit code 1, after its step is recorded."""
    options = [part for one in (*SETS, f"run.name='{name}'", *sets) for part in ("--set", one)]
    ran = vime("run", ALIGNED, "--output", output, *options)
    assert ran.code == (1 if name == "faulty" else 0), ran.text
    return output


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A sound run, which records taps because its configuration names samples, and a faulty one without."""
    place = tmp_path_factory.mktemp("replay")
    return run("sound", place / "sound", "run.taps=['0:0:0','1:2:1']"), run("faulty", place / "faulty")


def test_an_operation_of_one_layer_is_named(records: tuple[Path, Path]) -> None:
    ran = vime("diff", *records, "--replay", "--json", timeout=600)
    no_traceback(ran)
    assert ran.code == 1, ran.text
    found = ran.json["difference"]
    assert (found["step"], found["stage"], found["config"], found["taps"]) == (1, "train log-probs", [], None)
    replayed = ran.json["replay"]
    assert replayed["repeats"] == [True, True]
    first = replayed["difference"]["taps"]["first"]
    assert (first["layer"], first["operation"], first["inputs_equal"]) == (1, "post_attention_norm", True)
    assert "Step 1, update 0, train log-probs, prompt " in replayed["sentence"]
    assert "layer 1, post_attention_norm, position " in replayed["sentence"]
    assert "in the first run and" in replayed["sentence"]
    assert "every tap before it is equal; likely cause: the trainer's forward" in replayed["sentence"]


def test_taps_are_part_of_the_record(records: tuple[Path, Path]) -> None:
    record = records[0]
    files = sorted(path.relative_to(record).as_posix() for path in (record / "taps").rglob("*.parquet"))
    assert files == [
        f"taps/step-{step}-sample-{sample}-{side}.parquet"
        for step, sample in (("000000/prompt-000000", "000000"), ("000001/prompt-000002", "000001"))
        for side in ("engine", "trainer")
    ]
    assert set(files) <= set(json.loads((record / "seal.json").read_text())["files"])
