"""Digests of what a plugin consists of, so that a record tells one edit of it from another."""

from __future__ import annotations

import sys
from itertools import accumulate
from pathlib import Path

from blake3 import blake3


def source_version(module: object) -> str:
    """The version of a module that no distribution holds: ``source`` and 16 hex digits; empty without a file.

    What a module imports beside itself is not part of it: a package holds what belongs together.
    """
    file = _file(module)
    return f"source {_digest(file)[:16]}" if file else ""


def package_sources(module: str) -> str:
    """Digest (64 hex digits) of the top-level package that holds an imported module; empty where it has no files.

    A namespace package, which several distributions share, is none of them: the first package below it is taken.
    """
    names = accumulate(module.split("."), "{}.{}".format)
    files = (_file(sys.modules.get(name)) for name in names)
    return next((_digest(file) for file in files if file), "")


def _file(module: object) -> Path | None:
    path = Path(getattr(module, "__file__", None) or "")
    return path if path.is_file() else None


def _digest(file: Path) -> str:
    """blake3 over names and bytes of a module's file, of a package's every file."""
    place = file.parent
    files = _files(place) if file.name.startswith("__init__.") else [file]
    total = blake3()
    for one in files:
        total.update(f"{one.relative_to(place).as_posix()}\0".encode())
        total.update(blake3().update_mmap(one).digest())
    return total.hexdigest()


def _files(package: Path) -> list[Path]:
    """Everything but caches and hidden files: kernels, templates and word lists decide results as Python does."""
    found = [path.relative_to(package).parts for path in package.rglob("*") if path.is_file()]
    return [package.joinpath(*parts) for parts in sorted(found) if not any(map(_left_out, parts))]


def _left_out(name: str) -> bool:
    return name == "__pycache__" or name.startswith(".")
