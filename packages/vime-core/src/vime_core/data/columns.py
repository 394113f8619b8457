"""From the columns of a table to examples: which column is the prompt, which the label, and how a label is cut out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import ClassVar, NoReturn, TypeVar, cast

from pydantic import Field, JsonValue, model_validator

from vime_core.data.types import Example, Message, parse_messages
from vime_core.errors import DataError
from vime_core.plugins.types import Options

Row = dict[str, object]
_Self = TypeVar("_Self", bound="ColumnOptions")

GSM8K_MARKER = "####"


class ColumnOptions(Options):
    """Which columns of a file to use. Without keys, ``question``/``answer`` or ``messages``/``label`` is detected."""

    table: ClassVar[str] = "data"

    prompt_key: str | None = Field(None, description="Column of the prompt: a string or a list of messages.")
    label_key: str | None = Field(None, description="Column of the label; set together with prompt_key.")
    label_marker: str | None = Field(
        None,
        description="The label is the text after the last marker; '': the whole column. Default: '####' for"
        " question/answer, '' otherwise.",
    )
    metadata_keys: tuple[str, ...] = Field((), description="Further columns that the reward needs.")

    @model_validator(mode="after")
    def _keys_come_together(self: _Self) -> _Self:
        if (self.prompt_key is None) != (self.label_key is None):
            raise ValueError(f"{self.table}.prompt_key and {self.table}.label_key are set together or not at all")
        return self


@dataclass(frozen=True)
class Columns:
    """The decision for one file."""

    prompt: str
    label: str
    label_marker: str
    metadata: tuple[str, ...]
    table: str

    @property
    def used(self) -> tuple[str, ...]:
        """Every column that is read, each once."""
        return tuple(dict.fromkeys((self.prompt, self.label, *self.metadata)))


def choose_columns(found: Sequence[str], options: ColumnOptions, where: str) -> Columns:
    """Configured columns, or those of the one public form that the file has.

    Raises:
        DataError: a configured column is missing; neither public form is there, or both are. Names what was found.
    """
    if options.prompt_key is not None and options.label_key is not None:
        prompt, label, marker = options.prompt_key, options.label_key, ""
    else:
        prompt, label, marker = _detect(found, where)
    marker = marker if options.label_marker is None else options.label_marker
    chosen = Columns(prompt, label, marker, options.metadata_keys, options.table)
    for name in chosen.used:
        if name not in found:
            close = get_close_matches(name, found, n=1)
            hint = f"Did you mean {close[0]!r}? " if close else ""
            _refuse_columns(where, f"has no column {name!r}", found, f"{hint}Name a column that exists.")
    return chosen


def _detect(found: Sequence[str], where: str) -> tuple[str, str, str]:
    forms = [f for f in (("question", "answer", GSM8K_MARKER), ("messages", "label", "")) if {*f[:2]} <= {*found}]
    if len(forms) != 1:
        problem = (
            "has both question/answer and messages/label" if forms else "has neither question/answer nor messages/label"
        )
        _refuse_columns(where, problem, found, "Set prompt_key and label_key to the columns to use.")
    return forms[0]


def _refuse_columns(where: str, problem: str, found: Sequence[str], remedy: str) -> NoReturn:
    raise DataError(f"{where} {problem}; found: {', '.join(found) or 'none'}", remedy=remedy, code="VIME-DATA-005")


def to_example(row: Row, columns: Columns, where: str) -> Example:
    """One row as an example. Raises DataError with ``where`` and what is wrong with it."""
    for name in columns.used:
        if name not in row:
            _refuse_columns(where, f"has no column {name!r}", list(row), "Give every row the same columns.")
    try:
        messages = _messages(row[columns.prompt], columns.prompt)
        label = _label(row[columns.label], columns)
        metadata = {key: _json_value(key, row[key]) for key in columns.metadata}
    except ValueError as error:
        raise DataError(f"{where}: {error}", remedy="Correct or remove that row.", code="VIME-DATA-004") from error
    return Example(messages, label, metadata)


def _messages(value: object, column: str) -> tuple[Message, ...]:
    try:
        return parse_messages(value)
    except ValueError as error:
        raise ValueError(f"column {column!r}: {error}") from error


def _label(value: object, columns: Columns) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        raise ValueError(f"column {columns.label!r}: expected a string or an integer, found {type(value).__name__}")
    if columns.label_marker:
        _, marker, value = value.rpartition(columns.label_marker)
        if not marker:
            raise ValueError(
                f"column {columns.label!r} has no {columns.label_marker!r} before the final answer"
                f" ({columns.table}.label_marker; '': the whole column is the label)"
            )
    if not value.strip():
        raise ValueError(f"column {columns.label!r}: the label is empty")
    return value.strip()


def _json_value(key: str, value: object) -> JsonValue:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"column {key!r} holds no JSON value: {error}") from error
    return cast(JsonValue, value)
