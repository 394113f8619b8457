"""What GLM-5 cannot be run with is refused by name before a side is built."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vime_core.config.load import load_config
from vime_core.errors import ConfigError, VimeError
from vime_glm5.plugin import vime_check_run
from vime_glm5.source import RandomGlm5Options, configuration

CONFIG = Path(__file__).parents[3] / "configs" / "glm5-tiny.toml"


def check(tmp_path: Path, *overrides: str, **sizes: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps(configuration(RandomGlm5Options()) | sizes))
    config, _ = load_config([CONFIG], overrides)
    assert list(vime_check_run(config, tmp_path)) == []


def test_the_tiny_model_is_taken(tmp_path: Path) -> None:
    check(tmp_path)
    check(tmp_path, "trainer.megatron.data_parallel=4", "trainer.megatron.expert_parallel=4")
    check(tmp_path, "alignment.contract=glm5/v1-bf16kv", kv_lora_rank=96)
    check(tmp_path, "alignment.contract=dense/v1", "trainer.dtype=fp32", n_routed_experts=0)  # not this plugin's


@pytest.mark.parametrize(
    ("overrides", "sizes", "says"),
    [
        (["trainer.dtype=fp32"], {}, r"VIME-ALIGN-072: .*trainer\.dtype = 'fp32'"),
        (
            ["trainer.megatron.data_parallel=3", "trainer.megatron.expert_parallel=3"],
            {},
            r"expert_parallel = 3 does not divide the model's 8 experts",
        ),
        ([], {"num_experts_per_tok": 9}, "num_experts_per_tok = 9 .*n_routed_experts = 8 is less"),
        ([], {"qk_rope_head_dim": 130}, "qk_rope_head_dim = 130 .*index_head_dim = 128 is less"),
        ([], {"kv_lora_rank": 96}, "kv_lora_rank = 96 is no multiple of 128"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(
    overrides: list[str], sizes: dict[str, int], says: str, tmp_path: Path
) -> None:
    with pytest.raises(VimeError, match=says):
        check(tmp_path, *overrides, **sizes)


@pytest.mark.parametrize("option", ["experts_per_token=9", "rotary=33", "rotary=130"])
def test_a_random_model_of_such_sizes_is_refused_by_its_own_keys(option: str) -> None:
    with pytest.raises(ConfigError, match=rf"model\.random-glm5\.{option.split('=')[0]} = "):
        load_config([CONFIG], [f"model.random-glm5.{option}"])
