from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from vime_core.config.layers import parse_override
from vime_core.config.load import load_config, resolve
from vime_core.config.names import UNSUPPORTED, UNSUPPORTED_CHOICES
from vime_core.config.schema import AlgorithmSection, CorrectionSection
from vime_core.errors import ConfigError
from vime_core.loop.algorithm import load_algorithm


@pytest.mark.parametrize("path", UNSUPPORTED)
def test_what_there_is_not_is_said(path: str) -> None:
    with pytest.raises(ConfigError, match=f"{path} asks for .*, which vime does not do"):
        resolve(parse_override(f"{path}=1"))


@pytest.mark.parametrize("value", UNSUPPORTED_CHOICES["algorithm.advantage"][0])
def test_what_a_key_may_ask_for_elsewhere_is_said(value: str) -> None:
    with pytest.raises(ConfigError, match=rf"algorithm\.advantage = '{value}' asks for PPO with a critic, which vime"):
        resolve(parse_override(f"algorithm.advantage={value}"))


@pytest.mark.parametrize("correction", [{"level": "token"}, {"reject": True}])
def test_a_correction_needs_log_probs_from_before_training(correction: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="use 'recompute'"):
        AlgorithmSection.model_validate({"correction": correction})
    AlgorithmSection.model_validate({"correction": correction, "old_log_probs": "recompute"})


@pytest.mark.parametrize(
    ("bounds", "said"),
    [
        ({"low": 1.5, "high": 3.0}, r"algorithm\.correction\.low = 1\.5 leaves out the ratio 1.* set it to at most 1"),
        ({"low": 3.0, "high": 2.0}, r"algorithm\.correction\.low = 3\.0 leaves out"),
        ({"low": 0.0, "high": 1e-3}, r"algorithm\.correction\.high = 0\.001 leaves out .* set it to at least 1"),
        ({"mode": "truncate", "high": 0.9}, r"algorithm\.correction\.high = 0\.9 leaves out"),
    ],
)
def test_bounds_that_leave_out_agreement_are_refused(bounds: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        CorrectionSection.model_validate({"level": "token", **bounds})
    CorrectionSection.model_validate({"level": "token", "low": 1.0, "high": 1.0})


ALIGNED = Path(__file__).parents[4] / "configs" / "aligned-smoke.toml"
EXTRA = "sets={extra={source='reasoning-gym', reasoning-gym={task='chain_sum'}}}"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["algorithm.overlong_weight=0.5"], ["algorithm.overlong_weight = 0.5", "algorithm.overlong_buffer = 0"]),
        (["trainer.betas=[1.0, 1.0]"], ["trainer.betas.0 = 1.0", "less than 1"]),
        (["trainer.betas=0.9"], ["trainer.betas = 0.9", "--set 'trainer.betas=[0.9, 0.98]'"]),
        (["trainer.betas=[0.9, 0.9, 0.9]"], ["trainer.betas = [", "--set 'trainer.betas=[0.9, 0.98]'"]),
        (["trainer.betas=[0.9, 1.0]"], ["trainer.betas.1 = 1.0", "less than 1", "--set 'trainer.betas=[0.9, 0.98]'"]),
        (
            ["run.taps=['0:1']"],
            ["run.taps.0: '0:1' is not of the form STEP:PROMPT:SAMPLE", """--set 'run.taps=["0:3:1"]'"""],
        ),
        (["run.sinks=[3]"], ["run.sinks.0 = 3", """--set 'run.sinks=["console", "jsonl", "tensorboard"]'"""]),
        (["run.taps=['2:8:0']"], ["run.taps names '2:8:0'", "run.steps = 2"]),
        (["run.taps=['1:4:4']"], ["run.taps names '1:4:4'", "sampling.samples_per_prompt = 4"]),
        (["run.taps=['1:3:0']"], ["run.taps names '1:3:0'", "step 1 has those from 4 to 7"]),
        (["run.taps=['1:8:0']"], ["run.taps names '1:8:0'", "step 1 has those from 4 to 7"]),
        (["run.taps=['1:3:0']", "sampling.dynamic_rounds=2"], ["step 1 has those from 4 on"]),
        (["evaluation.every=0", f"evaluation.{EXTRA}"], ["evaluation.sets has extra", "evaluation.every = 0"]),
    ],
)
def test_what_would_do_nothing_is_refused(settings: list[str], said: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([ALIGNED], settings)
    assert [part for part in said if part not in str(caught.value)] == [], str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        ["algorithm.overlong_weight=0.5", "algorithm.overlong_buffer=2"],
        ["run.taps=['0:0:0', '1:7:3']"],
        ["run.taps=['1:8:0']", "sampling.dynamic_rounds=2"],
        ["evaluation.every=1", f"evaluation.{EXTRA}"],
    ],
)
def test_what_does_something_is_taken(settings: list[str]) -> None:
    load_config([ALIGNED], settings)


def test_a_reference_is_updated_only_where_there_is_one() -> None:
    every = "algorithm.reference_update_every=3"
    with pytest.raises(ConfigError, match=r"VIME-CONFIG-024: algorithm\.reference_update_every = 3 updates"):
        load_algorithm(*load_config([ALIGNED], [every]))
    for coefficient in ("algorithm.reward_kl=0.1", "algorithm.ppo-clip.kl_coefficient=0.1"):
        load_algorithm(*load_config([ALIGNED], [every, coefficient]))


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"mode": "mask"}, "mode"),
        ({"mode": "clip", "reject": True}, "mode"),
        ({"low": 0.25}, "low"),
        ({"high": 4.0}, "high"),
    ],
)
def test_what_a_correction_that_is_off_would_not_use_is_refused(given: dict[str, object], named: str) -> None:
    with pytest.raises(ValidationError, match=rf"algorithm\.correction\.{named} = .* corrects nothing, since"):
        CorrectionSection.model_validate(given)


@pytest.mark.parametrize("given", [{}, {"reject": True, "low": 0.25}, {"level": "token", "mode": "mask"}])
def test_what_a_correction_uses_is_taken(given: dict[str, object]) -> None:
    section = CorrectionSection.model_validate(given)
    assert CorrectionSection.model_validate(section.model_dump()) == section
