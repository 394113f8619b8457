"""A reward that fails in a run is no error of the configuration: exit code 3, with reward, distribution and prompt."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from vime_core.config.load import load_config
from vime_core.data.types import Example
from vime_core.errors import DataError, VimeError
from vime_core.loop.prompts import Prompt
from vime_core.loop.scoring import open_scorer, try_reward
from vime_core.types import Completion

SMOKE = Path(__file__).parents[4] / "configs" / "smoke.toml"
MOODY = """
import time
from vime_core.plugins import Reward, hookimpl
@hookimpl
def vime_rewards():
    yield Reward("moody", "Raises, or takes its time.", "moody_plugin:make")
def make(options):
    def score(item):
        if item.response_text == "slow":
            time.sleep(600)
        raise KeyError("lost")
    return score
"""


@pytest.fixture(autouse=True)
def moody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "moody_plugin.py").write_text(MOODY)
    info = tmp_path / "moody_dist-2.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: moody-dist\nVersion: 2.1\n")
    (info / "entry_points.txt").write_text("[vime]\nmoody = moody_plugin\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("moody_plugin", None)


@pytest.mark.parametrize(
    ("response", "limit_s", "code", "said"),
    [
        ("wrong", 120, "VIME-DATA-020", "KeyError: 'lost'"),
        ("slow", 1, "VIME-DATA-021", "took longer than reward.timeout_s"),
    ],
)
def test_a_reward_that_fails_in_a_run_is_named_with_its_distribution(
    response: str, limit_s: int, code: str, said: str
) -> None:
    config, plugins = load_config([SMOKE], [f"reward={{name='moody', timeout_s={limit_s}}}"])
    prompt = Prompt(7, 7, (1,), "1+1", Example((), "2"))
    completion = Completion(7, 1, (1,), np.zeros(1, np.float32), "stop", 0)
    with open_scorer(config, plugins) as scorer, pytest.raises(VimeError) as caught:
        scorer.score([prompt], [response], [completion])
    assert (caught.value.exit_code, caught.value.code) == (3, code)
    for part in ("reward.name = 'moody' of moody-dist 2.1", "prompt 7, sample 1", said):
        assert part in caught.value.message
    config, plugins = load_config([SMOKE], ["reward={name='moody', timeout_s=120}"])
    with pytest.raises(DataError) as tried:
        try_reward(config, plugins, prompt)
    assert (tried.value.exit_code, tried.value.code) == (2, "VIME-DATA-020")
