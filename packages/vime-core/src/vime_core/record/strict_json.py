"""JSON of a record, read strictly: a key that comes twice, NaN and Infinity are refused, not guessed at."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from vime_core.errors import RecordError

_Model = TypeVar("_Model", bound=BaseModel)


def read_file(path: Path) -> bytes:
    """A file of a record. Raises RecordError when it is not there or may not be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise RecordError(
            f"cannot read {str(path)!r}: {error.strerror or error}",
            remedy="Check that it is there and that you may read it.",
            code="VIME-RECORD-009",
        ) from error


def parse(model: type[_Model], path: Path, data: bytes, line: int = 0) -> _Model:
    """A document, or a line of one, as a model. Raises RecordError, naming the place."""
    return validated(model, path, loads(path, data, line), line)


def loads(path: Path, data: bytes, line: int = 0, *, constants: bool = False) -> Any:
    """Plain values.

    Args:
        path: for the message.
        data: UTF-8.
        line: number of the line, for the message; 0: the whole file.
        constants: take NaN and Infinity, as Python's ``json`` writes them.

    Raises:
        RecordError: it is no JSON, or an object has a key twice.
    """
    try:
        return json.loads(data, object_pairs_hook=_once, parse_constant=float if constants else _no_constant)
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"{_at(line)}{error}") from error


def validated(model: type[_Model], path: Path, raw: Any, line: int = 0) -> _Model:
    """Plain values as a model. Raises RecordError."""
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise damaged(path, f"{_at(line)}{where}: {first['msg']}") from error


def damaged(path: Path, what: str) -> RecordError:
    """The error for a file that is not what a record holds."""
    return RecordError(
        f"{str(path)!r} is damaged: {what}",
        remedy="Take the record from its source again, or run again.",
        code="VIME-RECORD-006",
    )


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(k for k in keys if keys.count(k) > 1)!r} comes twice")
    return table


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _at(line: int) -> str:
    return f"line {line}: " if line else ""
