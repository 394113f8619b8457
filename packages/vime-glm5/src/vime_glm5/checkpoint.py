"""Model source ``glm5-checkpoint``: a GLM-5 checkpoint in block FP8 or bf16, as bf16 masters, whole or in part.

A tensor ``NAME`` in e4m3 with ``NAME_scale_inv`` becomes rn(q * s) in bf16, as the contract dequantises; every other
one stays as it is. Layers behind the model's last (multi-token prediction) are left out. The result is made once, file
by file, so that memory holds one file of the checkpoint at a time.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import Field

from vime_core.config.paths import UserPath
from vime_core.config.schema import NonNegativeInt
from vime_core.errors import ConfigError
from vime_core.plugins.types import Options
from vime_glm5.structure import read_shape
from vime_megatron.model_directory import ModelDirectory, read_model_directory
from vime_megatron.sources.cache import cache_key, make_once

if TYPE_CHECKING:
    from torch import Tensor

FORMAT: Final = 1
"""Raise it whenever the same checkpoint gives other bits."""
SCALE: Final = "_scale_inv"
BLOCK: Final = 128
_LAYER: Final = re.compile(r"model\.layers\.(\d+)\.")
_BY_LAYER: Final = ("layer_types", "mlp_layer_types", "indexer_types")
_COPIED: Final = ("tokenizer*", "vocab*", "merges*", "special_tokens*", "generation_config.json", "chat_template*")


class Glm5CheckpointOptions(Options):
    """The ``[model.glm5-checkpoint]`` section."""

    path: UserPath = Field(description="Directory of the checkpoint.")
    layers: NonNegativeInt = Field(0, description="Keep so many layers, from the first; 0: all.")


def open_glm5_checkpoint(options: Glm5CheckpointOptions, cache_dir: Path) -> Path:
    """The bf16 directory in the cache, made when it is not there.

    Raises:
        ConfigError: the checkpoint is absent, damaged, or has fewer layers.
        PolicyError: its configuration has no definition in ``glm5/v1``.
    """
    source = read_model_directory(options.path)
    config = bf16_configuration(source.config, options.layers)
    read_shape(config)
    files = {file.name: (file.stat().st_size, file.stat().st_mtime_ns) for file in set(source.files.values())}
    copied = {file.name: sha256(file.read_bytes()).hexdigest() for file in _copied(source.path)}
    key = cache_key(
        {
            "format": FORMAT,
            "path": str(source.path.resolve()),
            "config": config,
            "files": sorted(files.items()),
            "copied": copied,
        }
    )
    place = cache_dir.expanduser() / "glm5-checkpoint" / key
    return make_once(place, lambda directory: _write(source, config, directory))


def bf16_configuration(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """A ``config.json`` without quantisation, of the first ``layers`` layers.

    Raises:
        ConfigError: the model has fewer, or its FP8 blocks are not 128 x 128.
    """
    _require_blocks(config.get("quantization_config"))
    held = int(config["num_hidden_layers"])
    if layers > held:
        raise ConfigError(
            f"model.glm5-checkpoint.layers = {layers}, but the checkpoint has {held}",
            remedy=f"Set at most {held}, or 0 for all.",
            code="VIME-CONFIG-091",
        )
    count = layers or held
    kept = {key: value for key, value in config.items() if key != "quantization_config"}
    cut = {key: list(kept[key])[:count] for key in _BY_LAYER if kept.get(key)}
    return {**kept, **cut, "num_hidden_layers": count, "num_nextn_predict_layers": 0, "dtype": "bfloat16"}


def _require_blocks(quantisation: Any) -> None:
    size = quantisation.get("weight_block_size") if isinstance(quantisation, Mapping) else None
    if size not in (None, [BLOCK, BLOCK]):
        raise ConfigError(
            f"config.json has quantization_config.weight_block_size = {size!r}; only {[BLOCK, BLOCK]} is dequantised",
            remedy=f"Use a checkpoint in blocks of {BLOCK} x {BLOCK}, or in bf16.",
            code="VIME-CONFIG-092",
        )


def _copied(path: Path) -> list[Path]:
    return sorted({file for pattern in _COPIED for file in path.glob(pattern) if file.is_file()})


def _write(source: ModelDirectory, config: Mapping[str, Any], directory: Path) -> None:
    from safetensors.torch import save_file

    directory.mkdir()
    weight_map: dict[str, str] = {}
    for number, file in enumerate(sorted(set(source.files.values()))):
        name = f"model-{number:05}.safetensors"
        tensors = dict(_converted(source, file, int(config["num_hidden_layers"])))
        if tensors:
            save_file(tensors, directory / name, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(tensors, name)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (directory / "config.json").write_text(json.dumps(dict(config), indent=1))
    for file in _copied(source.path):
        shutil.copy(file, directory / file.name)


def _converted(source: ModelDirectory, file: Path, layers: int) -> Iterator[tuple[str, Tensor]]:
    for name, held in source.files.items():
        match = _LAYER.match(name)
        if held == file and not name.endswith(SCALE) and not (match and int(match[1]) >= layers):
            yield name, _master(source, name)


def _master(source: ModelDirectory, name: str) -> Tensor:
    import torch

    from vime_core.numerics.arithmetic import narrow
    from vime_glm5.numerics.e4m3 import E4M3, BlockWeight, dequantise_weight

    tensor, scales = _read(source, name), f"{name}{SCALE}"
    if tensor.dtype != E4M3:
        return tensor
    if scales not in source.files:
        raise ConfigError(
            f"{str(source.files[name])!r} is corrupt: {name} is e4m3 and has no {scales}",
            remedy="Copy or download the checkpoint again.",
            code="VIME-CONFIG-043",
        )
    held = _read(source, scales)
    _require_scales(scales, tuple(held.shape), tuple(tensor.shape))
    return narrow(dequantise_weight(BlockWeight(tensor, held.float())), torch.bfloat16)


def _require_scales(name: str, found: tuple[int, ...], weight: tuple[int, ...]) -> None:
    wanted = tuple(-(-size // BLOCK) for size in weight)
    if found != wanted:
        raise ConfigError(
            f"{name} has shape {found}; a weight of shape {weight} in blocks of {BLOCK} x {BLOCK} has scales {wanted}",
            remedy=f"Use a checkpoint in blocks of {BLOCK} x {BLOCK}, or in bf16.",
            code="VIME-CONFIG-092",
        )


def _read(source: ModelDirectory, name: str) -> Tensor:
    from safetensors import safe_open

    with safe_open(source.files[name], framework="pt") as opened:
        return opened.get_tensor(name)
