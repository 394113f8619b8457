from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from vime_core.config.load import UNSUPPORTED, UNSUPPORTED_CHOICES, parse_override, resolve
from vime_core.config.schema import AlgorithmSection
from vime_core.errors import ConfigError


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


def test_bounds_out_of_order_are_refused() -> None:
    with pytest.raises(ValidationError, match="is more than high"):
        AlgorithmSection.model_validate({"correction": {"low": 3.0, "high": 2.0}})
