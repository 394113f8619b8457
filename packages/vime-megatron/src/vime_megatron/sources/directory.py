"""Model source ``directory``: a HF model directory that is already on this machine."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from vime_core.config.paths import UserPath
from vime_core.errors import ConfigError
from vime_core.plugins.types import Options
from vime_megatron.model_directory import read_model_directory, require_tokenizer


class DirectoryOptions(Options):
    """The ``[model.directory]`` section."""

    path: UserPath = Field(description="A HF model directory: config.json, safetensors, tokenizer.")


def open_directory(options: DirectoryOptions, cache_dir: Path) -> Path:  # noqa: ARG001 (the sources' signature)
    """The directory itself, after its files were checked.

    Raises:
        ConfigError: it or one of its files is missing or corrupt.
    """
    path = options.path.resolve()
    if not path.is_dir():
        raise ConfigError(
            f"model.directory.path = {str(path)!r} {'is no directory' if path.exists() else 'does not exist'}",
            remedy="Set model.directory.path to a HF model directory; relative paths start at the working directory.",
            code="VIME-CONFIG-040",
        )
    read_model_directory(path)
    require_tokenizer(path)
    return path
