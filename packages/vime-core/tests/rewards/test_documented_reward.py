"""The reward in docs/plugins.md is registered, built and scores as it stands there, and every field is described."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from vime_core.data.types import Example, Message
from vime_core.plugins import Reward
from vime_core.plugins.manager import PluginManager, PluginSelection
from vime_core.rewards import RewardInput
from vime_core.rewards.pool import score_all
from vime_core.rewards.types import RewardSpec

GUIDE = (Path(__file__).parents[4] / "docs" / "plugins.md").read_text()


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "length_reward").mkdir()
    files = re.findall(r"```python\n# (length_reward/\w+\.py): .*?\n(.*?)```", GUIDE, re.S)
    assert [name for name, _ in files] == ["length_reward/plugin.py", "length_reward/reward.py"]
    for name, source in files:
        (tmp_path / name).write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in [name for name in sys.modules if name.startswith("length_reward")]:
        del sys.modules[name]


def test_the_documented_reward_works(installed: None) -> None:
    manager = PluginManager.discover(PluginSelection(modules=("length_reward.plugin",)))
    manager.require()
    entry = manager.find(Reward, "length-target", field_name="reward.name")
    options = entry.options_class().model_validate({"target": 4})
    example = Example((Message("user", "How much?"),), "4", {})
    answers = [("four", "stop"), ("fo", "stop"), ("four", "length")]
    items = [RewardInput("p", text, example, reason) for text, reason in answers]
    assert score_all(RewardSpec(entry.target, options), items, 60.0) == (1.0, 1 / 3, 0.0)


def test_every_field_of_the_input_is_described() -> None:
    described = set(re.findall(r"^\| `(\w+)` \| .*\|$", GUIDE, re.M))
    assert {field.name for field in fields(RewardInput)} <= described
