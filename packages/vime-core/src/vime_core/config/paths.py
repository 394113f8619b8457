"""Paths in a configuration: ``~`` is the user's home, and what no file system takes is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator


def named(value: object) -> object:
    """The value as it is. Raises ValueError for the empty string, which `Path` takes for the working directory."""
    if value == "":
        raise ValueError("the path is empty")
    return value


def checked_path(path: Path) -> Path:
    """The path as it is. Raises ValueError for a NUL byte."""
    if "\0" in str(path):
        raise ValueError(f"the path {str(path)!r} holds a NUL byte")
    return path


def user_path(path: Path) -> Path:
    """The path with ``~`` expanded. Raises ValueError for a NUL byte or the home of nobody."""
    try:
        return checked_path(path).expanduser()
    except RuntimeError as error:
        raise ValueError(f"the path {str(path)!r} starts with the home of an unknown user") from error


UserPath = Annotated[Path, BeforeValidator(named), AfterValidator(user_path)]
LatePath = Annotated[Path, BeforeValidator(named), AfterValidator(checked_path)]
"""A path that keeps its ``~``, since a record shows it; who uses it expands it."""
