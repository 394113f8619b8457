"""The model of a run: where it is, and whether a plugin knows its structure, before anything is started."""

from __future__ import annotations

import json
from dataclasses import dataclass
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


@dataclass(frozen=True)
class ModelFacts:
    """Sizes of a model that a run must fit; None where its configuration does not say."""

    context: int | None
    vocabulary: int | None


_SIZES = (
    *("vocab_size", "max_position_embeddings", "hidden_size", "intermediate_size"),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
)


def model_facts(directory: Path) -> ModelFacts:
    """The sizes in ``config.json``. Raises ConfigError when one of them is no positive integer."""
    config = read_model_config(directory)
    for key in _SIZES:
        value = config.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value <= 0):
            raise ConfigError(
                f"the model's {str(directory / 'config.json')!r} has {key} = {value!r}; a positive integer is needed",
                remedy="Correct the file, or give another model directory.",
                code="VIME-CONFIG-012",
            )
    # With scaled positions only the structure knows how far they reach.
    context = None if config.get("rope_scaling") else config.get("max_position_embeddings")
    return ModelFacts(context, config.get("vocab_size"))


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
