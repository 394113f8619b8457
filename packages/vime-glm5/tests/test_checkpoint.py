"""FP8 checkpoints become bf16 masters, whole or cut; what is missing is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from glm5_support import assert_same
from safetensors.torch import load_file, save_file

from vime_core.errors import ConfigError
from vime_glm5.checkpoint import Glm5CheckpointOptions, open_glm5_checkpoint
from vime_glm5.numerics.e4m3 import dequantise_weight, quantise_weight
from vime_glm5.source import RandomGlm5Options, make_random_glm5, weight_shapes
from vime_glm5.structure import read_shape

KEPT = ("norm", "embed", "lm_head", "mlp.gate.", "weights_proj", "indexer.wk.")


def fp8(name: str, tensor: torch.Tensor) -> bool:
    return tensor.ndim == 2 and not any(part in name for part in KEPT)


@pytest.fixture(scope="module")
def masters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = RandomGlm5Options.model_validate({"layers": 4, "dense_layers": 2})
    return make_random_glm5(options, tmp_path_factory.mktemp("cache"))


@pytest.fixture
def checkpoint(masters: Path, tmp_path: Path) -> Path:
    """In FP8, in two files, with a layer of multi-token prediction behind the last."""
    place, tensors = tmp_path / "fp8", {}
    place.mkdir()
    for name, tensor in load_file(masters / "model.safetensors").items():
        if fp8(name, tensor):
            held = quantise_weight(tensor)
            tensors |= {name: held.q, f"{name}_scale_inv": held.scales}
        else:
            tensors[name] = tensor
    tensors["model.layers.4.eh_proj.weight"] = torch.zeros(4, 4, dtype=torch.bfloat16)
    names = sorted(tensors)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in files.items():
        save_file({n: tensors[n].contiguous() for n in part}, place / file)
    index = {"weight_map": {n: file for file, part in files.items() for n in part}}
    (place / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((masters / "config.json").read_text())
    quantised: dict[str, Any] = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (place / "config.json").write_text(json.dumps({**config, **quantised, "num_nextn_predict_layers": 1}))
    (place / "tokenizer.json").write_bytes((masters / "tokenizer.json").read_bytes())
    return place


def loaded(directory: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        found |= load_file(file)
    return found


def options(path: Path, layers: int = 0) -> Glm5CheckpointOptions:
    return Glm5CheckpointOptions.model_validate({"path": path, "layers": layers})


def test_masters_are_what_the_checkpoint_says(masters: Path, checkpoint: Path, tmp_path: Path) -> None:
    made = open_glm5_checkpoint(options(checkpoint), tmp_path / "cache")
    found, original = loaded(made), load_file(masters / "model.safetensors")
    assert set(found) == set(original)
    quantised = [name for name, tensor in original.items() if fp8(name, tensor)]
    assert len(quantised) > 60
    for name, tensor in original.items():
        wanted = dequantise_weight(quantise_weight(tensor)).bfloat16() if name in quantised else tensor
        assert_same(found[name], wanted)
    assert "quantization_config" not in json.loads((made / "config.json").read_text())
    assert (made / "tokenizer.json").is_file()
    assert open_glm5_checkpoint(options(checkpoint), tmp_path / "cache") == made


def test_the_first_layers_are_a_model(checkpoint: Path, tmp_path: Path) -> None:
    made = open_glm5_checkpoint(options(checkpoint, layers=3), tmp_path / "cache")
    shape = read_shape(json.loads((made / "config.json").read_text()))
    assert shape.layers == 3
    assert {name: tuple(t.shape) for name, t in loaded(made).items()} == weight_shapes(shape)
    with pytest.raises(ConfigError, match="VIME-CONFIG-091"):
        open_glm5_checkpoint(options(checkpoint, layers=5), tmp_path / "cache")


def test_a_missing_scale_is_named(checkpoint: Path, tmp_path: Path) -> None:
    index = checkpoint / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    del weight_map["model.layers.0.self_attn.o_proj.weight_scale_inv"]
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ConfigError, match=r"o_proj.weight is e4m3 and has no .*o_proj.weight_scale_inv"):
        open_glm5_checkpoint(options(checkpoint), tmp_path / "cache")


def test_blocks_of_another_size_are_named(checkpoint: Path, tmp_path: Path) -> None:
    file = checkpoint / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "quantization_config": {"weight_block_size": [64, 128]}}))
    with pytest.raises(ConfigError, match=r"quantization_config.weight_block_size = \[64, 128\]"):
        open_glm5_checkpoint(options(checkpoint), tmp_path / "cache")


@pytest.mark.parametrize("change", ["one", "doubled", "a column more"])
def test_scales_that_are_not_of_the_blocks_are_named(change: str, checkpoint: Path, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.down_proj.weight_scale_inv"
    file = checkpoint / json.loads((checkpoint / "model.safetensors.index.json").read_text())["weight_map"][name]
    tensors = load_file(file)
    held = tensors[name]
    changed = {
        "one": held[:1, :1],
        "doubled": held.repeat_interleave(2, 0),
        "a column more": torch.cat([held, held[:, :1]], 1),
    }[change]
    assert changed.shape != held.shape
    save_file({**tensors, name: changed.contiguous()}, file)
    with pytest.raises(ConfigError, match=r"down_proj.weight_scale_inv has shape .* has scales"):
        open_glm5_checkpoint(options(checkpoint), tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("config.json"))


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja", "generation_config.json"])
def test_what_is_copied_is_copied_anew_when_it_changes(name: str, checkpoint: Path, tmp_path: Path) -> None:
    first = open_glm5_checkpoint(options(checkpoint), tmp_path / "cache")
    (checkpoint / name).write_text("{}")
    second = open_glm5_checkpoint(options(checkpoint), tmp_path / "cache")
    assert (second / name).read_text() == "{}"
    assert first != second


def test_the_configuration_for_machines_that_have_the_checkpoint_is_valid() -> None:
    from vime_core.config.load import load_config

    file = Path(__file__).parents[3] / "configs" / "glm5.2-6layer.toml"
    config, _ = load_config([file], [])
    chosen: Any = config.options("model", "glm5-checkpoint")
    clip: Any = config.options("algorithm", "ppo-clip")
    assert (chosen.layers, chosen.path.name) == (6, "GLM-5.2-FP8")
    assert (1 - clip.clip_low, 1 + clip.clip_high) == (0.5, 2.0)
    assert (config.trainer.lr, config.sampling.prompts_per_step, config.rollout.context_length) == (2e-6, 8, 4096)
