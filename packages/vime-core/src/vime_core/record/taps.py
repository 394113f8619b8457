"""Taps of a recorded sample: rows of intermediate tensors by token position, one Parquet file a side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from vime_core.errors import RecordError
from vime_core.types import SampleKey

if TYPE_CHECKING:
    from vime_core.backends import Taps

Side = Literal["engine", "trainer"]
_STORED: Final = {"bfloat16": "uint16"}
"""What numpy holds the bits of a torch dtype in, where it does not know it."""


@dataclass(frozen=True)
class TapRows:
    """Rows of one tap by token position: ``positions`` int64 [T] ascending, ``rows`` [T, W].

    ``dtype`` is torch's name; numpy has no bfloat16, so such rows are the bits as uint16.
    """

    positions: NDArray[np.int64]
    rows: NDArray[Any]
    dtype: str


def from_torch(taps: Taps) -> dict[str, TapRows]:
    """What `record_taps` of a side gave, for comparison on the host."""
    import torch

    result: dict[str, TapRows] = {}
    for name, (positions, rows) in taps.items():
        bits = rows.view(torch.uint16) if rows.dtype == torch.bfloat16 else rows
        dtype = str(rows.dtype).removeprefix("torch.")
        result[name] = TapRows(positions.numpy(), bits.contiguous().numpy(), dtype)
    return result


def taps_name(key: SampleKey, side: Side) -> str:
    """The file of one side's taps of a sample, in the folder of its step."""
    return f"prompt-{key[0]:06d}-sample-{key[1]:06d}-{side}.parquet"


def taps_to_parquet(taps: Mapping[str, TapRows]) -> bytes:
    """A file of taps in their order: a row for each tap and position."""
    pa, pq = import_module("pyarrow"), import_module("pyarrow.parquet")
    rows: list[tuple[str, int, str, bytes]] = [
        (name, int(position), one.dtype, row.tobytes())
        for name, one in taps.items()
        for position, row in zip(one.positions, one.rows, strict=True)
    ]
    names, types = ("tap", "position", "dtype", "row"), (pa.string(), pa.int64(), pa.string(), pa.binary())
    columns = list(zip(*rows, strict=True)) or [()] * len(names)
    table = pa.table({n: pa.array(c, t) for n, c, t in zip(names, columns, types, strict=True)})
    sink = BytesIO()
    pq.write_table(table, sink, compression="zstd", compression_level=1)
    return sink.getvalue()


def read_taps(path: Path) -> dict[str, TapRows]:
    """The taps of a file in their order.

    Raises:
        RecordError: it is missing or damaged.
    """
    try:
        table: list[dict[str, Any]] = import_module("pyarrow.parquet").read_table(path).to_pylist()
        grouped: dict[str, list[dict[str, Any]]] = {}
        for row in table:
            grouped.setdefault(row["tap"], []).append(row)
        return {name: _rows(rows) for name, rows in grouped.items()}
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise RecordError(
            f"cannot read the taps {str(path)!r}: {error}",
            remedy="Take the record from its source again; this file is missing or damaged.",
            code="VIME-RECORD-006",
        ) from error


def _rows(rows: list[dict[str, Any]]) -> TapRows:
    dtype = str(rows[0]["dtype"])
    values = [np.frombuffer(row["row"], dtype=_STORED.get(dtype, dtype)) for row in rows]
    return TapRows(np.array([row["position"] for row in rows], dtype=np.int64), np.stack(values), dtype)
