"""The recipe's own files with a tiny model and a data set of GSM8K's form: every command of its page, in order."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from command import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.engine]
PAGE = ROOT / "docs" / "reproducibility.md"
SMALL = [
    *("run.steps=2", "run.checkpoint_every=1", "sampling.prompts_per_step=2", "sampling.samples_per_prompt=2"),
    *("sampling.max_tokens=12", "rollout.context_length=256", "rollout.threads=1", "rollout.vllm.kv_cache_gib=0.25"),
    # a random model answers nothing right, and without a reward nothing would change
    *(
        "reward.name='length'",
        "trainer.threads=1",
        "trainer.lr=1e-3",
        "evaluation.every=1",
        "evaluation.prompts=2",
        "evaluation.max_tokens=8",
    ),
]


def commands() -> list[str]:
    """The blocks of the page that are marked to be run."""
    return re.findall(r"<!-- run -->\n```\n(.*?)```", PAGE.read_text(), flags=re.S)


@pytest.fixture(scope="module")
def place(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory as the page expects it, with the repository's files beside."""
    directory = tmp_path_factory.mktemp("recipe")
    (directory / "gsm8k").mkdir()
    rows = [
        {"question": f"What is {a} + {a + 1}?", "answer": f"{a} + {a + 1} = {2 * a + 1}\n#### {2 * a + 1}"}
        for a in range(16)
    ]
    for name in ("train", "test"):
        pq.write_table(pa.Table.from_pylist(rows), directory / "gsm8k" / f"{name}.parquet")
    shutil.copytree(tiny_model, directory / "Qwen2.5-0.5B-Instruct")
    for name in ("configs", "scripts", "tools"):
        (directory / name).symlink_to(ROOT / name)
    return directory


def shell(script: str, place: Path) -> subprocess.CompletedProcess[str]:
    """As a user types it, but for the sizes: `vime run` and `vime doctor` get ``SMALL`` as well."""
    small = place / "small.toml"
    small.write_text(_table(SMALL))
    script = script.replace("configs/qwen2.5-0.5B-gsm8k.toml", "configs/qwen2.5-0.5B-gsm8k.toml $SMALL")
    sets = " ".join(f"--set {setting}" for setting in SMALL)
    script = script.replace("reproducibility.sh", f"reproducibility.sh {sets}").replace("$SMALL", str(small))
    variables = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "MODEL": str(place / "Qwen2.5-0.5B-Instruct"),
        "DATA": str(place / "gsm8k"),
        "OMP_NUM_THREADS": "1",
    }
    script = script.replace('"${MODEL_ARGS[@]}"', "")  # these are the real model's; see the test of the converter
    return subprocess.run(
        ["bash", "-euc", script], cwd=place, env=variables, capture_output=True, text=True, timeout=900
    )


def _table(settings: list[str]) -> str:
    return "".join(f"{key} = {value}\n" for key, _, value in (setting.partition("=") for setting in settings))


def test_every_command_of_the_page_runs(place: Path) -> None:
    doctor, run, compare, convert, by_ranks = commands()
    for script in (doctor, run, compare, convert, by_ranks):
        done = shell(script, place)
        assert done.returncode == 0, done.stdout + done.stderr
        print(done.stdout)
    manifest = json.loads((place / "runs" / "first" / "manifest.json").read_text())
    assert (manifest["status"], manifest["policy"]) == ("complete", "reproducible/v1")
    assert (place / "back" / "model.safetensors").is_file()


def test_flashinfer_is_refused_with_its_reason_before_anything_starts(place: Path) -> None:
    done = shell("OUTPUT=runs/flashinfer BACKEND=FLASHINFER scripts/run-qwen2.5-0.5B-reproducibility.sh", place)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "FLASHINFER is refused: its decode kernel has other bits than its prefill" in done.stderr
    assert not (place / "runs" / "flashinfer").exists()


def test_the_recipe_is_the_published_one() -> None:
    config = tomllib.loads((ROOT / "configs" / "qwen2.5-0.5B-gsm8k.toml").read_text())
    sampling, trainer, clip = config["sampling"], config["trainer"], config["algorithm"]["ppo-clip"]
    assert config["run"]["steps"] == 100
    assert (sampling["prompts_per_step"], sampling["samples_per_prompt"], sampling["max_tokens"]) == (32, 8, 1024)
    assert (trainer["lr"], trainer["betas"], trainer["weight_decay"]) == (1e-6, [0.9, 0.98], 0.1)
    assert (clip["clip_low"], clip["clip_high"], clip["kl_coefficient"]) == (0.2, 0.28, 0.0)
    assert (config["evaluation"]["every"], config["evaluation"]["temperature"]) == (20, 0.0)
    assert trainer["token_budget"] == 9216
    assert config["algorithm"]["reduction"] == "token"


def test_the_script_touches_no_other_process() -> None:
    script = (ROOT / "scripts" / "run-qwen2.5-0.5B-reproducibility.sh").read_text()
    assert not re.search(r"\b(kill|pkill|killall|ray stop)\b", script)
