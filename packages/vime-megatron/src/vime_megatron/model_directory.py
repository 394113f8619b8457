"""A HF model directory: its configuration and where each tensor stands, checked before anything is built from it."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from safetensors import SafetensorError, safe_open

from vime_core.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True)
class ModelDirectory:
    """``config`` is ``config.json``; ``files`` says which safetensors file holds each tensor."""

    path: Path
    config: Mapping[str, Any]
    files: Mapping[str, Path]

    @property
    def model_type(self) -> str:
        return str(self.config["model_type"])

    def load(self) -> dict[str, Tensor]:
        """Every tensor, on the CPU, in the directory's own dtypes."""
        tensors: dict[str, Tensor] = {}
        for file in sorted(set(self.files.values())):
            with safe_open(file, framework="pt") as opened:
                tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        return tensors


def read_model_directory(path: Path) -> ModelDirectory:
    """Open a HF model directory. Reads headers, not weights, and imports no torch.

    Raises:
        ConfigError: the directory or a file of it is missing or corrupt.
    """
    if not path.is_dir():
        raise _unusable(
            f"model directory {str(path)!r} does not exist", remedy="Correct the path.", code="VIME-CONFIG-040"
        )
    config = _read_json(path / "config.json")
    if not isinstance(config.get("model_type"), str):
        raise _corrupt(path / "config.json", "it names no model_type")
    return ModelDirectory(path, config, _tensor_files(path))


def require_tokenizer(path: Path) -> None:
    """Raise ConfigError when a model directory holds no tokenizer."""
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        raise _unusable(
            f"model directory {str(path)!r} holds no tokenizer ({', '.join(TOKENIZER_FILES)})",
            remedy="Copy the model's tokenizer files into it.",
            code="VIME-CONFIG-041",
        )


def _tensor_files(path: Path) -> dict[str, Path]:
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        return dict.fromkeys(_tensor_names(path / "model.safetensors"), path / "model.safetensors")
    listed = _read_json(index).get("weight_map")
    if not isinstance(listed, dict):
        raise _corrupt(index, "it has no weight_map")
    weight_map = cast("dict[str, str]", listed)
    held = {file: _tensor_names(path / file) for file in sorted(set(weight_map.values()))}
    for name, file in weight_map.items():
        if name not in held[file]:
            raise _corrupt(path / file, f"it lacks tensor {name!r}, which {index.name} places there")
    return {name: path / file for name, file in weight_map.items()}


def _tensor_names(file: Path) -> frozenset[str]:
    _require_file(file)
    try:
        with safe_open(file, framework="numpy") as opened:
            names: Iterable[str] = opened.keys()
            return frozenset(names)
    except (SafetensorError, OSError) as error:
        raise _corrupt(file, str(error)) from error


def _read_json(file: Path) -> dict[str, Any]:
    _require_file(file)
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise _corrupt(file, str(error)) from error
    if not isinstance(content, dict):
        raise _corrupt(file, "it is no JSON object")
    return cast("dict[str, Any]", content)


def _require_file(file: Path) -> None:
    if not file.is_file():
        raise _unusable(
            f"model directory {str(file.parent)!r} has no {file.name}",
            remedy="Use a complete HF model directory with safetensors weights.",
            code="VIME-CONFIG-042",
        )


def _corrupt(file: Path, reason: str) -> ConfigError:
    return _unusable(
        f"{str(file)!r} is corrupt: {reason}", remedy="Copy or download the file again.", code="VIME-CONFIG-043"
    )


def _unusable(message: str, *, remedy: str, code: str) -> ConfigError:
    return ConfigError(message, remedy=remedy, code=code)
