"""The model of a run: where it is, and whether a plugin knows its structure, before anything is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from vime_core.config.schema import RunConfig
from vime_core.errors import ConfigError
from vime_core.plugins.manager import PluginManager
from vime_core.plugins.types import ModelSource, ModelStructure


def model_directory(config: RunConfig, plugins: PluginManager) -> Path:
    """The HF directory that the configured model source gives, of a structure that the trainer knows."""
    name = config.model.source
    entry = plugins.find(ModelSource, name, field_name="model.source")
    directory: Path = entry.load()(config.options("model", name), config.run.cache.expanduser())
    require_structure(directory, config.trainer.backend, plugins)
    return directory


def require_structure(directory: Path, backend: str, plugins: PluginManager) -> None:
    """Raise ConfigError when no plugin registered the model's ``model_type`` for the trainer backend."""
    found = model_type(directory)
    known = [s.name for s in plugins.of_kind(ModelStructure) if s.backend == backend]
    if found not in known:
        raise ConfigError(
            f"model {str(directory)!r} has model_type {found!r}, and no plugin registers that structure for"
            f" trainer.backend = {backend!r}. Known: {', '.join(known) or 'none'}",
            remedy="Install a plugin that registers the structure (hook vime_model_structures), or take another model.",
            code="VIME-CONFIG-011",
        )


def model_type(directory: Path) -> str:
    """The HF ``model_type`` of a model directory; empty when its configuration names none."""
    return str(read_model_config(directory).get("model_type", ""))


def read_model_config(directory: Path) -> dict[str, Any]:
    """``config.json`` of a model directory. Raises ConfigError when it is missing or no JSON object."""
    file = directory / "config.json"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot read the model's {str(file)!r}: {error}",
            remedy="Give a HF model directory with a valid config.json.",
            code="VIME-CONFIG-012",
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(
            f"{str(file)!r} holds no JSON object",
            remedy="Give a HF model directory with a valid config.json.",
            code="VIME-CONFIG-012",
        )
    return cast(dict[str, Any], content)
