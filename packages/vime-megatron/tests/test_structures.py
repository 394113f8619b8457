from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vime_core.config.schema import PluginsSection
from vime_core.errors import ConfigError, PluginError
from vime_megatron.structures.dense import LLAMA, QWEN2
from vime_megatron.structures.registry import find_structure
from vime_megatron.testing import SHAPE, hf_log_probs, hf_model, random_sequences, run_config

CONFIG = {**SHAPE, "rms_norm_eps": 1e-6}


def test_optional_keys_have_their_usual_meaning() -> None:
    config = {key: value for key, value in CONFIG.items() if key != "num_key_value_heads"}
    blueprint = LLAMA.blueprint(config)
    assert blueprint.head_dim == SHAPE["hidden_size"] // SHAPE["num_attention_heads"]
    assert blueprint.transformer["num_query_groups"] == SHAPE["num_attention_heads"]
    assert not blueprint.tied


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window = True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"hidden_size": None}, "hidden_size = None"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers = 'two'"),
        ({"vocab_size": 0}, "vocab_size = 0"),
        ({"rms_norm_eps": None}, "rms_norm_eps = None"),
    ],
)
def test_what_is_not_built_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    QWEN2.blueprint(CONFIG)
    with pytest.raises(ConfigError, match=named):
        QWEN2.blueprint({**CONFIG, **change})


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("rope", [{}, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}])
def test_optional_biases_and_yarn_are_those_of_transformers(
    model_type: str, rope: dict[str, Any], tmp_path: Path, open_at: Callable[..., Any]
) -> None:
    given = {"rope_parameters": {**rope, "rope_theta": 1e4}} if rope else {}
    model = hf_model(model_type, attention_bias=True, mlp_bias=True, head_dim=8, **given)
    model.save_pretrained(tmp_path / "model")
    trainer = open_at(tmp_path / "model")
    assert {name for name, _ in trainer.weights()} == {name for name, _ in model.named_parameters()}
    sequences = random_sequences([(3, 20), (1, 5)])
    ours = trainer.log_probs([sequences])
    theirs = [hf_log_probs(model, sequence).detach().numpy() for sequence in sequences]
    assert max(np.abs(a - b).max() for a, b in zip(ours, theirs, strict=True)) < 2e-5
    for name, bias in model.named_parameters():
        bias.data.mul_(0.0 if name.endswith("bias") else 1.0)
    without = [hf_log_probs(model, sequence).detach().numpy() for sequence in sequences]
    biased = any(name.endswith("bias") for name, _ in trainer.weights())
    assert (max(np.abs(a - b).max() for a, b in zip(ours, without, strict=True)) > 1e-3) == biased


def test_a_structure_that_nobody_registered_is_named() -> None:
    with pytest.raises(PluginError, match=r"model_type = 'mamba9'.*llama, qwen2, qwen3") as caught:
        find_structure("mamba9", PluginsSection())
    assert caught.value.code == "VIME-PLUGIN-021"


def test_a_disabled_plugin_registers_nothing() -> None:
    with pytest.raises(PluginError, match="Known: none"):
        find_structure("llama", PluginsSection(disable=("megatron", "glm5")))


def test_the_trainer_names_an_unregistered_structure(tmp_path: Path, open_at: Callable[..., Any]) -> None:
    hf_model("gpt_neox", num_key_value_heads=None).save_pretrained(tmp_path / "model")
    with pytest.raises(PluginError, match="gpt_neox"):
        open_at(tmp_path / "model")


THIRD_PARTY = """
from vime_core.plugins import ModelStructure, hookimpl
from vime_megatron.structures.dense import LLAMA as STRUCTURE

@hookimpl
def vime_model_structures():
    yield ModelStructure("mistral", "By somebody else.", "somebody_else:STRUCTURE", backend="megatron")
"""


def test_another_plugin_can_add_a_structure(
    tmp_path: Path, open_at: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "somebody_else.py").write_text(THIRD_PARTY)
    monkeypatch.syspath_prepend(str(tmp_path))
    hf_model("mistral", sliding_window=None, head_dim=8).save_pretrained(tmp_path / "model")
    with pytest.raises(PluginError, match="mistral"):
        open_at(tmp_path / "model")
    trainer = open_at(tmp_path / "model", run_config(modules=("somebody_else",)))
    assert len(dict(trainer.weights())) == 21
    sys.modules.pop("somebody_else", None)
