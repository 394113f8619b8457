"""Make a directory once: built beside its place, then renamed, so that an interrupted build leaves nothing behind."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from blake3 import blake3
from safetensors import SafetensorError

from vime_core.errors import ConfigError


def cache_key(content: Mapping[str, Any]) -> str:
    """A short name for what was asked for."""
    return blake3(json.dumps(content, sort_keys=True).encode()).hexdigest(length=10)


def make_once(place: Path, make: Callable[[Path], None]) -> Path:
    """``place``, made by ``make(directory that does not exist)`` when it is not there yet.

    Raises:
        ConfigError: the cache cannot be written.
    """
    if place.is_dir():
        return place
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{place.name}-", dir=place.parent) as workshop:
            make(Path(workshop) / "made")
            _publish(Path(workshop) / "made", place)
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"{str(place)!r} cannot be written: {error}",
            remedy="Free space, or set run.cache to a directory that can be written.",
            code="VIME-CONFIG-057",
        ) from error
    return place


def _publish(made: Path, place: Path) -> None:
    try:
        os.rename(made, place)
    except OSError:
        if not place.is_dir():  # else another process was faster: its result is the same
            raise
