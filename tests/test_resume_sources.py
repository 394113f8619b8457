"""A run with an installed reward goes on with the code that it began with, or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path

import bigram
import pytest
from command import PLUGINS, Ran, no_traceback, vime

pytestmark = pytest.mark.slow
REWARD = "def make(options):\n    return lambda item: float(len(item.response_text) % 5)\n"
PLUGIN = """
from vime_core.plugins import Reward, hookimpl
@hookimpl
def vime_rewards():
    yield Reward("mine", "Mine.", "vime_mine.reward:make")
"""
SETS = [
    *bigram.OVERRIDES,
    "run.checkpoint_every=1",
    "reward={name='mine'}",
    "sampling.prompts_per_step=2",
    "sampling.samples_per_prompt=2",
    "sampling.max_tokens=8",
]


@pytest.fixture
def reward(tmp_path: Path) -> Path:
    """The reward's file in the package of an installed distribution."""
    package, info = tmp_path / "site" / "vime_mine", tmp_path / "site" / "vime_mine-0.1.dist-info"
    package.mkdir(parents=True)
    info.mkdir()
    (package / "__init__.py").touch()
    (package / "plugin.py").write_text(PLUGIN)
    (package / "reward.py").write_text(REWARD)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vime-mine\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[vime]\nmine = vime_mine.plugin\n")
    return package / "reward.py"


def test_an_edited_distribution_does_not_go_on(smoke: Path, tmp_path: Path, reward: Path) -> None:
    record = tmp_path / "run"

    def run(*arguments: str | Path) -> Ran:
        ran = vime("run", *arguments, env={"PYTHONPATH": os.pathsep.join([str(PLUGINS), str(reward.parents[1])])})
        no_traceback(ran)
        return ran

    sets = [part for one in [*SETS, f"run.cache='{tmp_path / 'cache'}'"] for part in ("--set", one)]
    began = run(smoke, "--output", record, *sets)
    assert began.code == 0, began.text
    plugins = {plugin["name"]: plugin for plugin in json.loads((record / "manifest.json").read_text())["plugins"]}
    assert {name for name, plugin in plugins.items() if plugin["sources"]} == plugins.keys() - {"bigram"}

    went_on = run("--resume", record, "--set", "run.steps=3")
    assert went_on.code == 0, went_on.text
    before = {path: path.read_bytes() for path in record.rglob("*") if path.is_file()}

    reward.write_text(REWARD.replace(" % 5)", " % 5) + 1.0"))
    refused = run("--resume", record, "--set", "run.steps=4")
    assert refused.code == 2, refused.text
    for part in ("VIME-CONFIG-017", "vime-mine 0.1", plugins["mine"]["sources"][:16], "as they were"):
        assert part in refused.text
    assert {path: path.read_bytes() for path in record.rglob("*") if path.is_file()} == before

    reward.write_text(REWARD)
    assert run("--resume", record, "--set", "run.steps=4").code == 0
    assert len((record / "steps.jsonl").read_text().splitlines()) == 4
