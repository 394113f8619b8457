"""Layers of a configuration: TOML files and ``--set``, each a nested table, laid over one another."""

from __future__ import annotations

import errno
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from vime_core.config.explain import is_text, write_as_table
from vime_core.config.schema import RunConfig
from vime_core.errors import ConfigError

Table = dict[str, Any]


def read_toml(file: Path) -> Table:
    """Raises ConfigError naming the file and, for a syntax error, the line."""
    try:
        if not is_text(str(file)):
            raise OSError(errno.EINVAL, "its path is no UTF-8; rename it")  # a record names it
        if file.is_char_device() or file.is_block_device():
            raise OSError(errno.EINVAL, "it is a device")
        with file.open("rb") as stream:
            # With a last line break, what is wrong on the last line has its number.
            return tomllib.loads(stream.read().decode() + "\n")
    except (OSError, ValueError) as error:
        if isinstance(error, tomllib.TOMLDecodeError | UnicodeDecodeError):
            raise _no_toml(file, error) from error
        raise ConfigError(
            f"cannot read configuration {str(file)!r}: {getattr(error, 'strerror', None) or error}",
            remedy=_is_record(file, error) or "Check the path; `configs/` holds ready ones.",
            code="VIME-CONFIG-001",
        ) from error
    except RecursionError as error:
        raise _no_toml(file, error) from error


def parse_override(text: str) -> Table:
    """``trainer.lr=1e-6`` as a nested table. The value is TOML; what is no TOML value is taken as a string."""
    path, separator, value = text.partition("=")
    keys = path.strip().split(".")
    if not separator or not all(keys):
        raise ConfigError(
            f"--set {text!r} is not of the form section.key=value",
            remedy="Write, for example, --set trainer.lr=1e-6",
            code="VIME-CONFIG-003",
        )
    parsed: Any = _toml_value(value.strip())
    for key in reversed(keys):
        parsed = {key: parsed}
    return cast(Table, parsed)


def overlay(base: Mapping[str, Any], top: Mapping[str, Any]) -> Table:
    """``top`` over ``base``: tables merge, everything else is replaced."""
    merged = dict(base)
    for key, value in top.items():
        old = merged.get(key)
        both = isinstance(old, dict) and isinstance(value, dict)
        merged[key] = overlay(cast(Table, old), cast(Table, value)) if both else value
    return merged


def refuse_flat_sections(layer: Table) -> None:
    """Before tables are laid over one another: a layer above or below would hide a section that is no table."""
    for section in RunConfig.model_fields:
        if not isinstance(layer.get(section, {}), dict):
            raise ConfigError(
                f"{section} = {layer[section]!r}: input should be a table",
                remedy=write_as_table(section),
                code="VIME-CONFIG-007",
            )


def _is_record(file: Path, error: Exception) -> str:
    if not (isinstance(error, IsADirectoryError) and (file / "manifest.json").is_file()):
        return ""
    return "That is a run record; give the TOML file of the run instead."


def _no_toml(file: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"{str(file)!r} is not valid TOML: {error}",
        remedy="Correct the line that is named.",
        code="VIME-CONFIG-002",
    )


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return text
