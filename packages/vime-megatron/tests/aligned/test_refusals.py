"""What is refused by name before anything is computed, and what the process report says where nothing is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from vime_core.alignment import CONTRACT_SETTINGS, choose_alignment, require_same_contract
from vime_core.config.schema import RunConfig
from vime_core.errors import ConfigError, PluginError, PolicyError, VimeError
from vime_core.numerics import DENSE_V1, Operations, RopeScaling, rope_scaling, rope_table
from vime_core.plugins.manager import PluginManager
from vime_megatron.aligned.dense import DENSE
from vime_megatron.aligned.holding import hold_contract
from vime_megatron.aligned.refuse import refuse_config
from vime_megatron.aligned.testing import DENSE_ALIGNMENT
from vime_megatron.model import _transformer_config
from vime_megatron.rope import read_rope
from vime_megatron.structures.dense import LLAMA, QWEN2, QWEN3
from vime_megatron.testing import SHAPE, random_sequences, run_config

CONFIG = {**SHAPE, "rms_norm_eps": 1e-6}
OTHER_CONTRACT = replace(DENSE_V1, operations=DENSE_V1.operations[:-1])


def code(caught: pytest.ExceptionInfo[VimeError]) -> str:
    assert caught.value.remedy
    return caught.value.code


@pytest.mark.parametrize("spec", ["auto", "aligned"])
def test_a_contract_makes_the_model_aligned(spec: str, llama: Path, open_aligned: Callable[..., Any]) -> None:
    (report,) = open_aligned(llama, spec=spec).processes()
    assert report.settings["spec"] == "aligned"
    assert report.settings["contract"] == "dense/v1"
    assert report.settings["contract_digest"] == DENSE_V1.digest
    assert report.settings["provider"] == "cpu"
    assert all(report.settings[name] for name in CONTRACT_SETTINGS)
    require_same_contract(DENSE_ALIGNMENT, [report, replace(report, role="rollout")])


@pytest.mark.parametrize("spec", ["auto", "local"])
def test_without_a_contract_the_model_is_megatrons(spec: str, llama: Path, open_aligned: Callable[..., Any]) -> None:
    trainer = open_aligned(llama, alignment=None, spec=spec)
    (report,) = trainer.processes()
    assert report.settings["spec"] == "local"
    assert not set(CONTRACT_SETTINGS) & set(report.settings)
    with pytest.raises(PolicyError, match=r"alignment.contract is empty") as caught:
        trainer.record_taps(random_sequences([(2, 3)])[0])
    assert code(caught) == "VIME-ALIGN-038"


@pytest.mark.parametrize(
    ("alignment", "options", "named", "expected"),
    [
        (DENSE_ALIGNMENT, ("local", 1), r"spec = 'local' contradicts alignment.contract = 'dense/v1'", "030"),
        (None, ("aligned", 1), r"spec = 'aligned' needs a contract", "031"),
        (DENSE_ALIGNMENT, ("auto", 2), r"tensor_parallel = 1; 2 is set", "032"),
        (replace(DENSE_ALIGNMENT, contract=OTHER_CONTRACT), ("auto", 1), f"digest {OTHER_CONTRACT.digest[:16]}", "035"),
        (replace(DENSE_ALIGNMENT, trainer_side="vime_core.errors:VimeError"), ("auto", 1), "no MegatronSide", "037"),
    ],
)
def test_what_contradicts_the_contract_is_refused(
    alignment: Any, options: tuple[str, int], named: str, expected: str
) -> None:
    with pytest.raises((PolicyError, PluginError), match=named) as caught:
        hold_contract(alignment, *options)
    assert code(caught) == f"VIME-ALIGN-{expected}"


def test_an_absent_side_or_provider_is_named() -> None:
    with pytest.raises(PluginError, match="no_such_module"):
        hold_contract(replace(DENSE_ALIGNMENT, trainer_side="no_such_module:SIDE"), "auto", 1)
    with pytest.raises(PolicyError, match="'abacus'"):
        hold_contract(replace(DENSE_ALIGNMENT, provider="abacus"), "auto", 1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tensor_model_parallel_size", 2),
        ("pipeline_model_parallel_size", 2),
        ("context_parallel_size", 2),
        ("sequence_parallel", True),
        ("activation_func", torch.nn.functional.gelu),
        ("gated_linear_unit", False),
        ("hidden_dropout", 0.1),
        ("attention_dropout", 0.1),
        ("recompute_granularity", "full"),
        ("recompute_granularity", "selective"),
        ("normalization", "LayerNorm"),
        ("layernorm_zero_centered_gamma", True),
        ("fp32_residual_connection", True),
        ("add_bias_linear", True),
        ("rotary_interleaved", True),
        ("window_size", (128, 0)),
        ("softmax_scale", 0.5),
        ("num_moe_experts", 8),
        ("fp8", "e4m3"),
        ("attention_output_gate", True),
        ("cuda_graph_impl", "local"),
    ],
)
def test_every_other_setting_of_megatron_is_refused_by_name(field: str, value: object) -> None:
    for structure, dtype in ((LLAMA, torch.bfloat16), (QWEN2, torch.float32), (QWEN3, torch.bfloat16)):
        config = _transformer_config(structure.blueprint(CONFIG), dtype, 1, True)
        refuse_config(config, "dense/v1")
        setattr(config, field, value)
        with pytest.raises(PolicyError, match=rf"TransformerConfig\.{field} = ") as caught:
            refuse_config(config, "dense/v1")
        assert code(caught) == "VIME-ALIGN-033"
        refuse_config(config, "dense/v1", frozenset({field}))


def test_a_structures_setting_is_refused_when_the_model_is_built(operations: Operations) -> None:
    blueprint = LLAMA.blueprint(CONFIG)
    blueprint = replace(blueprint, transformer={**blueprint.transformer, "window_size": (64, 0)})
    held = hold_contract(DENSE_ALIGNMENT, "auto", 1)
    assert held is not None
    with pytest.raises(PolicyError, match="window_size = None"):
        held.model(_transformer_config(blueprint, torch.float32, 1, True), blueprint, 128)


def test_unknown_rotary_embeddings_are_refused(llama: Path, open_aligned: Callable[..., Any], tmp_path: Path) -> None:
    shutil.copytree(llama, place := tmp_path / "model")
    config = json.loads((place / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "spiral", "rope_theta": 1e4}
    (place / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="rope_type 'spiral'"):
        open_aligned(place)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 2.5},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        {"rope_type": "yarn", "factor": 4.0},
    ],
)
def test_the_rotary_table_is_the_one_that_a_config_gives_elsewhere(scaling: dict[str, Any]) -> None:
    parameters = {**scaling, "rope_theta": 5e5}
    ours = rope_table(300, 64, *read_rope({"rope_parameters": parameters, "max_position_embeddings": 300}))
    assert torch.equal(ours, rope_table(300, 64, *rope_scaling(parameters, 300)))
    other = rope_table(300, 64, 5e5, RopeScaling("linear", factor=3.0))
    assert not torch.equal(ours, other)


def test_the_installed_plugin_offers_the_side() -> None:
    plugins = PluginManager.discover()
    table = run_config().model_dump()
    config = RunConfig.model_validate({**table, "alignment": {"contract": "dense/v1"}})
    with pytest.raises(PolicyError, match=r"backend 'megatron' does not keep it .*llama, qwen2, qwen3"):
        choose_alignment(config, plugins, "mamba9")
    sides = [s for s in plugins.entries() if s.registration.name == "dense/v1 megatron"]
    assert [side.registration.load() for side in sides] == [DENSE]
