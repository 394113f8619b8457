"""What ``vime plugins new`` writes: the text files beside this module, with names put in."""

from __future__ import annotations

import re
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from string import Template

from vime_core.errors import ConfigError


def write_skeleton(name: str, parent: Path) -> Path:
    """A distribution in ``parent / name``, whose structure is called like it without a leading ``vime-``.

    Raises:
        ConfigError: the name is none for a distribution, or something is there already.
    """
    module = name.replace("-", "_")
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name) or not module.isidentifier():
        raise _unusable(f"{name!r} is no name for a distribution", "Use lower-case words joined by '-': vime-mine.")
    place = parent / name
    if place.exists():
        raise _unusable(f"{str(place)!r} exists", "Choose another name, or move it away.")
    names = {"name": name, "module": module, "structure": module.removeprefix("vime_")}
    _write(files("vime_cli.skeleton"), place, names)
    return place


def _write(source: Traversable, place: Path, names: dict[str, str]) -> None:
    for item in source.iterdir():
        target = place / Template(item.name.removesuffix(".txt").replace("_module_", "$module")).substitute(names)
        if item.is_dir() and item.name != "__pycache__":
            _write(item, target, names)
        elif item.name.endswith(".txt"):
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(Template(item.read_text()).substitute(names))


def _unusable(what: str, remedy: str) -> ConfigError:
    return ConfigError(what, remedy=remedy, code="VIME-CONFIG-080")
