"""JSONL and Parquet datasets in GSM8K's public forms."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

from pydantic import Field

from vime_core.config.paths import UserPath
from vime_core.data.columns import ColumnOptions, Columns, Row, choose_columns, to_example
from vime_core.data.types import Dataset, Example
from vime_core.errors import DataError


class JsonlOptions(ColumnOptions):
    """A UTF-8 file with one JSON object a line; blank lines are ignored."""

    table = "data.jsonl"

    path: UserPath = Field(description="The file.")


class ParquetOptions(ColumnOptions):
    """A Parquet file."""

    table = "data.parquet"

    path: UserPath = Field(description="The file.")


@dataclass(frozen=True)
class ExampleList:
    """A dataset that is held in memory."""

    examples: tuple[Example, ...]

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int, /) -> Example:
        return self.examples[index]


def open_jsonl(options: JsonlOptions) -> Dataset:
    """Read a JSONL file.

    Raises:
        DataError: the file is missing, empty or no UTF-8; a line is no JSON object (with its number); columns are
            missing (with those found).
    """
    rows = list(_jsonl_rows(options.path))
    if not rows:
        _refuse_empty(options.path)
    columns = choose_columns(list(rows[0][1]), options, str(options.path))
    return ExampleList(tuple(to_example(row, columns, f"{options.path}, line {line}") for line, row in rows))


def open_parquet(options: ParquetOptions) -> Dataset:
    """Read a Parquet file; only the columns in use are decoded.

    Raises:
        DataError: the file is missing, empty or no Parquet; columns are missing (with those found); a row is unusable
            (with its number, from 0).
    """
    names, read = _open_parquet_file(options.path)
    columns = choose_columns(names, options, str(options.path))
    rows = read(columns)
    if not rows:
        _refuse_empty(options.path)
    return ExampleList(tuple(to_example(row, columns, f"{options.path}, row {i}") for i, row in enumerate(rows)))


def _jsonl_rows(path: Path) -> Iterator[tuple[int, Row]]:
    for number, line in enumerate(_read_bytes(path).split(b"\n"), start=1):
        if line.strip():
            yield number, _parse_line(line, f"{path}, line {number}")


def _parse_line(line: bytes, where: str) -> Row:
    try:
        row: object = json.loads(line.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        _refuse_row(where, f"not valid JSON: {error}")
    if not isinstance(row, dict):
        _refuse_row(where, f"expected a JSON object, found {type(row).__name__}")
    return cast(Row, row)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _refuse_row(where: str, problem: str) -> NoReturn:
    raise DataError(f"{where}: {problem}", remedy="Correct or remove that line.", code="VIME-DATA-004")


def _refuse_empty(path: Path) -> NoReturn:
    raise DataError(
        f"dataset {str(path)!r} is empty", remedy="Give a file with at least one example.", code="VIME-DATA-003"
    )


def _refuse_unreadable(path: Path, error: OSError) -> NoReturn:
    raise DataError(
        f"cannot read dataset {str(path)!r}: {error.strerror or error}",
        remedy="Check the path and its permissions; relative paths start at the working directory.",
        code="VIME-DATA-001",
    ) from error


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        _refuse_unreadable(path, error)


def _open_parquet_file(path: Path) -> tuple[Sequence[str], Any]:
    import pyarrow  # here, not above: only who reads Parquet pays for it
    import pyarrow.parquet  # pyright: ignore[reportUnusedImport]

    arrow = cast(Any, pyarrow)
    data = _read_bytes(path)
    if not data:
        _refuse_empty(path)
    try:
        file: Any = arrow.parquet.ParquetFile(arrow.BufferReader(data))
    except (arrow.ArrowException, OSError) as error:
        _refuse_corrupt(path, error)

    def read(columns: Columns) -> list[Row]:
        try:
            return file.read(columns=list(columns.used)).to_pylist()
        except (arrow.ArrowException, OSError, ValueError) as error:
            _refuse_corrupt(path, error)

    return file.schema_arrow.names, read


def _refuse_corrupt(path: Path, error: Exception) -> NoReturn:
    raise DataError(
        f"{str(path)!r} is not a readable Parquet file: {error}",
        remedy="Download or write the file again.",
        code="VIME-DATA-002",
    ) from error
