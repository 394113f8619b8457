"""What of a config.json is read and refused, and the shares of layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vime_core.errors import PolicyError
from vime_glm5.megatron.structure import STRUCTURE, rules
from vime_glm5.source import RandomGlm5Options, configuration, make_random_glm5, weight_shapes
from vime_glm5.structure import read_shape


def config(**changes: Any) -> dict[str, Any]:
    return {**configuration(RandomGlm5Options.model_validate({})), **changes}


@given(st.integers(1, 6), st.integers(0, 5), st.integers(1, 20))
def test_layers_that_choose_are_those_of_transformers(frequency: int, offset: int, layers: int) -> None:
    from transformers import GlmMoeDsaConfig

    given_ = {"num_hidden_layers": layers, "index_topk_freq": frequency, "index_skip_topk_offset": offset}
    wanted = GlmMoeDsaConfig(**given_).indexer_types
    chosen = [i for i, kind in enumerate(wanted) if kind == "full"]
    if chosen and chosen[0] == 0:
        shape = read_shape(config(**given_))
        assert list(shape.indexed_layers) == chosen
        assert [shape.choosing_layer(i) for i in chosen] == chosen
        assert read_shape(config(num_hidden_layers=layers, indexer_types=wanted)).indexed_layers == tuple(chosen)


def test_the_published_schedule() -> None:
    shape = read_shape(config(num_hidden_layers=12, index_topk_freq=4, index_skip_topk_offset=3))
    assert shape.indexed_layers == (0, 1, 2, 6, 10)
    assert [shape.choosing_layer(layer) for layer in (3, 5, 6, 9, 11)] == [2, 2, 6, 6, 10]


REFUSED = {
    "hidden_act": "gelu",
    "n_group": 8,
    "scoring_func": "softmax",
    "indexer_rope_interleave": False,
    "norm_topk_prob": False,
    "tie_word_embeddings": True,
    "model_type": "deepseek_v3",
    "quantization_config": {"quant_method": "fp8"},
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6},
    "kv_lora_rank": 0,
    "rms_norm_eps": "small",
    "n_routed_experts": None,
    "indexer_types": ["shared"] * 6,
    "num_experts_per_tok": 9,
    "qk_rope_head_dim": 33,
    "mlp_layer_types": ["dense"] * 5,
    "index_topk_freq": "often",
}


@pytest.mark.parametrize("key", REFUSED)
def test_what_the_contract_does_not_define_is_refused_by_name(key: str) -> None:
    with pytest.raises(PolicyError, match="VIME-ALIGN-071") as error:
        read_shape(config(**{key: REFUSED[key]}))
    named = "rope_type" if key == "rope_parameters" else key
    assert named in error.value.message


def test_rules_name_every_weight_once() -> None:
    shape = read_shape(config())
    sources = [name for rule in rules(shape) for name in rule.sources]
    assert len(sources) == len(set(sources))
    assert set(sources) == set(weight_shapes(shape))


def test_without_a_contract_there_is_no_model() -> None:
    with pytest.raises(PolicyError, match="VIME-ALIGN-073"):
        STRUCTURE.blueprint(config()).block_spec()


def test_the_random_model_is_a_function_of_its_options(tmp_path: Path) -> None:
    options = RandomGlm5Options.model_validate({"layers": 1, "dense_layers": 1})
    first, second = (make_random_glm5(options, tmp_path / name) for name in "ab")
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
    other = make_random_glm5(options.model_copy(update={"seed": 1}), tmp_path / "a")
    assert (other / "model.safetensors").read_bytes() != (first / "model.safetensors").read_bytes()
