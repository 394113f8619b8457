"""What pydantic finds wrong in a table, as an error that names the key, the value, and what instead."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar, cast, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from vime_core.errors import ConfigError

_Model = TypeVar("_Model", bound=BaseModel)


def validated(
    model: type[_Model], table: Any, prefix: str, tables: Mapping[str, Sequence[str]] | None = None
) -> _Model:
    """A table as a model.

    Args:
        model: what it must be.
        table: of one section, or of the whole configuration.
        prefix: path of the table, for messages; empty for the whole configuration.
        tables: plugin tables that each section may have besides, for messages.

    Raises:
        ConfigError: a key is unknown or missing, or a value is none of those that it takes.
    """
    for path, value in _undecodable(table, prefix):
        raise ConfigError(
            f"{path} = {value!r}: it holds bytes that are no UTF-8, which no record can hold",
            remedy=f"Give another {path}; a file or directory can be renamed.",
            code="VIME-CONFIG-007",
        )
    try:
        # As JSON, strictly: lists may be tuples and strings paths, but true is no 1 and "3" no number.
        return model.model_validate_json(json.dumps(table, default=_refuse_date), strict=True)
    except ValidationError as error:
        raise _explain(error, model, prefix, tables or {}) from error


def unknown_key(path: str, key: str, known: Sequence[str]) -> ConfigError:
    """The error of a key that is none of the ``known`` ones, with the one that looks most like it."""
    close = get_close_matches(key, known, n=1)
    hint = f"Did you mean {path.removesuffix(key)}{close[0]}? " if close else ""
    return ConfigError(
        f"unknown key {path}",
        remedy=f"{hint}Known keys there: {', '.join(known) or 'none'}.",
        code="VIME-CONFIG-004",
    )


def fields_at(model: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """Keys of a model, or of what lies in it at a location."""
    current: Any = model
    for part in location:
        current = _annotation_at(current, part)
    fields: Mapping[str, Any] = getattr(current, "model_fields", {})
    return [name for name in fields if name != "plugin_options"]


def write_as_table(path: str) -> str:
    """The remedy where something else stands in the place of a table."""
    return f"Write {path} as a table: [{path}] in the file, or --set {path}.KEY=VALUE."


def is_text(value: str) -> bool:
    """Whether it holds none of the letters that stand for bytes of the command line which are no UTF-8."""
    return not any("\ud800" <= letter <= "\udfff" for letter in value)


def _undecodable(value: object, path: str) -> Iterator[tuple[str, str]]:
    """Strings that came from bytes of the command line which are no text, by their keys."""
    if isinstance(value, str):
        if not is_text(value):
            yield path, value
    elif isinstance(value, Mapping):
        for key, one in cast("Mapping[str, object]", value).items():
            yield from _undecodable(one, f"{path}.{key}" if path else key)
    elif isinstance(value, Sequence):
        for one in cast("Sequence[object]", value):
            yield from _undecodable(one, path)


def _refuse_date(value: object) -> str:
    raise ConfigError(
        f"the configuration holds the {type(value).__name__} {value}, and no key takes one",
        remedy="Put it into quotes.",
        code="VIME-CONFIG-007",
    )


def _explain(
    error: ValidationError, model: type[BaseModel], prefix: str, tables: Mapping[str, Sequence[str]]
) -> ConfigError:
    """KEY = VALUE: the value has the wrong type, lies out of range, or is none of those that the key takes."""
    first = error.errors()[0]
    path = ".".join([*([prefix] if prefix else []), *(str(part) for part in first["loc"])])
    if first["type"] == "extra_forbidden":
        known = fields_at(model, first["loc"][:-1])
        in_section = tables.get(str(first["loc"][0]), ()) if len(first["loc"]) == 2 else ()
        return unknown_key(path, str(first["loc"][-1]), [*known, *in_section])
    rest = len(error.errors()) - 1
    more = f" ({rest} more of the kind)" if rest else ""
    remedy = _remedy(first, path, _whole_list(first, model, prefix))
    return ConfigError(_message(first, path) + more, remedy=remedy, code="VIME-CONFIG-007")


def _message(detail: ErrorDetails, path: str) -> str:
    if detail["type"] == "missing":
        return f"{path} is required but not set"
    if detail["type"] == "value_error":
        text = detail["msg"].removeprefix("Value error, ")
        return text if isinstance(detail["input"], dict) else f"{path}: {text}"
    said = detail["msg"].replace("valid tuple", "valid array").replace("an object", "a table")
    return f"{path} = {detail['input']!r}: {said[0].lower()}{said[1:]}"


def _whole_list(detail: ErrorDetails, model: type[BaseModel], prefix: str) -> str:
    """Of an item of a list, or what stands in a list's place: KEY=LIST, as --set takes it; empty elsewhere."""
    location = detail["loc"]
    none = len(location) if detail["type"] in ("tuple_type", "too_long") else 0
    number = next((place for place, part in enumerate(location) if isinstance(part, int)), none)
    if not number:
        return ""
    holder: Any = model
    for part in location[: number - 1]:
        holder = _annotation_at(holder, part)
    key = ".".join([*([prefix] if prefix else []), *map(str, location[:number])])
    field = getattr(holder, "model_fields", {}).get(location[number - 1])
    shown: object = getattr(field, "default", None) or next(iter(getattr(field, "examples", None) or ()), None)
    return f"{key}={json.dumps(shown) if isinstance(shown, tuple) else '[...]'}"


def _remedy(detail: ErrorDetails, path: str, whole_list: str) -> str:
    if whole_list:
        return f"Correct {path} in the file, or give the whole list, as in --set '{whole_list}'."
    if detail["type"] == "value_error":
        return "Change one of the named keys." if isinstance(detail["input"], dict) else f"Correct {path}."
    if detail["type"] == "missing" and "." not in path:
        return f"Write a table [{path}] into the file; docs/configuration.md lists its keys."
    if detail["type"] in ("model_type", "dict_type", "model_attributes_type"):
        return write_as_table(path)
    return f"Correct {path} in the file, or give --set {path}=VALUE."


def _annotation_at(holder: Any, part: int | str) -> Any:
    """Of a model's field, or of what a mapping holds."""
    if fields := getattr(holder, "model_fields", None):
        return fields[part].annotation if part in fields else None
    return get_args(holder)[-1] if get_args(holder) else None
