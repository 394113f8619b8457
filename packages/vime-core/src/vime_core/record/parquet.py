"""Columns of samples as Parquet and back, every bit kept.

Plain encoding: log-probs hardly repeat, and no dictionary has to decide whether two NaNs are the same value.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import numpy as np

from vime_core.errors import RecordError
from vime_core.record.samples import FIELDS, REFERENCE, Column, Columns, Field

_ARROW_NAMES: Final = {"float32": "float", "float64": "double"}


def to_parquet(columns: Columns, fields: Sequence[Field] = FIELDS) -> bytes:
    """Columns as a Parquet file: a step's, or those of ``fields``."""
    pa, pq = _pyarrow()
    sink = BytesIO()
    fields = _with_reference(fields, columns)
    table = pa.table({field.name: _to_arrow(field, columns[field.name]) for field in fields})
    pq.write_table(table, sink, compression="zstd", compression_level=1, use_dictionary=False)
    return sink.getvalue()


def from_parquet(path: Path, fields: Sequence[Field] = FIELDS) -> dict[str, Column]:
    """The columns of a Parquet file: a step's, or those of ``fields``.

    Raises:
        RecordError: the file is missing, damaged, or holds other columns.
    """
    pa, pq = _pyarrow()
    try:
        table = pq.ParquetFile(path).read()
    except (OSError, ValueError, pa.ArrowException) as error:  # a name that is no text is a ValueError
        raise RecordError(
            f"cannot read {str(path)!r}: {error}",
            remedy="Take the record from its source again; this file is missing or damaged.",
            code="VIME-RECORD-006",
        ) from error
    fields = _with_reference(fields, table.column_names)
    _require_schema(table, path, fields)
    return {field.name: _from_arrow(field, table.column(field.name).combine_chunks()) for field in fields}


def _with_reference(fields: Sequence[Field], names: Container[str]) -> list[Field]:
    """The fields of a step, with the reference model's where it is there."""
    return [*fields, *([REFERENCE] if REFERENCE.name in names else [])]


def _pyarrow() -> tuple[Any, Any]:
    """pyarrow has no types of its own; imported on use, it costs others nothing."""
    return import_module("pyarrow"), import_module("pyarrow.parquet")


def _to_arrow(field: Field, column: Column) -> Any:
    pa, _ = _pyarrow()
    if column.lengths is None:
        return pa.array(column.values)
    ends = np.concatenate([[0], np.cumsum(column.lengths)]).astype(np.int32)
    if field.form == "text":
        return pa.StringArray.from_buffers(
            len(column.lengths), pa.py_buffer(ends), pa.py_buffer(column.values.tobytes())
        )
    return pa.ListArray.from_arrays(pa.array(ends), pa.array(column.values))


def _from_arrow(field: Field, array: Any) -> Column:
    if field.form == "scalar":
        return Column(_numpy(array))
    if field.form == "text":
        texts = [text.encode() for text in array.to_pylist()]
        return Column(np.frombuffer(b"".join(texts), dtype=np.uint8), np.array([len(t) for t in texts], dtype=np.int64))
    return Column(_numpy(array.flatten()), np.diff(_numpy(array.offsets)).astype(np.int64))


def _numpy(array: Any) -> Any:
    return array.to_numpy(zero_copy_only=False)


def _require_schema(table: Any, path: Path, fields: Sequence[Field]) -> None:
    found = {field.name: str(field.type) for field in table.schema}
    for field in fields:
        wanted = _arrow_type(field)
        column = table.column(field.name) if field.name in found else None
        nested = column is not None and field.form == "list" and any(c.values.null_count for c in column.chunks)
        if column is None or found[field.name] not in wanted or column.null_count or nested:
            raise RecordError(
                f"{str(path)!r} is not a step's samples: column {field.name!r} is {found.get(field.name, 'missing')}"
                f" instead of {wanted[0]} without nulls",
                remedy="Read it with the vime that wrote it, or take the record from its source again.",
                code="VIME-RECORD-006",
            )


def _arrow_type(field: Field) -> tuple[str, ...]:
    name = _ARROW_NAMES.get(field.dtype, field.dtype)
    if field.form == "list":
        return (f"list<element: {name}>", f"list<item: {name}>")
    return ("string",) if field.form == "text" else (name,)
