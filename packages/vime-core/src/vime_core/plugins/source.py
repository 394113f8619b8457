"""The version of a module that no distribution holds: a digest of its source."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from blake3 import blake3


def source_version(module: object) -> str:
    """``source`` and 16 hex digits over the module's file, a package's every Python file; empty without a file.

    What a module imports beside itself is not part of it: a package holds what belongs together.
    """
    path = Path(getattr(module, "__file__", None) or "") if isinstance(module, ModuleType) else Path()
    if not path.is_file():
        return ""
    place = path.parent
    files = sorted(place.rglob("*.py")) if path.name == "__init__.py" else [path]
    total = blake3()
    for file in files:
        total.update(f"{file.relative_to(place).as_posix()}\0".encode())
        total.update(blake3(file.read_bytes()).digest())
    return f"source {total.hexdigest()[:16]}"
