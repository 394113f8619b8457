"""Make a directory once: built beside its place, then renamed, so that an interrupted build leaves nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from blake3 import blake3


def cache_key(content: Mapping[str, Any]) -> str:
    """A short name for what was asked for."""
    return blake3(json.dumps(content, sort_keys=True).encode()).hexdigest(length=10)


def make_once(place: Path, make: Callable[[Path], None]) -> Path:
    """``place``, made by ``make(empty directory)`` when it is not there yet."""
    if place.is_dir():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    workshop = Path(tempfile.mkdtemp(prefix=f".{place.name}-", dir=place.parent))
    try:
        make(workshop / "made")
        _publish(workshop / "made", place)
    finally:
        shutil.rmtree(workshop, ignore_errors=True)
    return place


def _publish(made: Path, place: Path) -> None:
    try:
        os.rename(made, place)
    except OSError:
        if not place.is_dir():  # else another process was faster: its result is the same
            raise
