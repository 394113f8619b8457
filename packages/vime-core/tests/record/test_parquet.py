from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import make_step

from vime_core.errors import RecordError
from vime_core.record.parquet import from_parquet, to_parquet
from vime_core.record.samples import FIELDS, Column, sample_columns, train_columns

STEP = make_step(0)
KEYS = [sample.key for sample in STEP.samples]
COLUMNS = sample_columns(STEP.samples) | train_columns(KEYS, STEP.advantages, [0, 0, 0, 0], STEP.train_log_probs)
SPECIAL = st.sampled_from([0, 0x80000000, 0x7F800000, 0x7FC00000, 0x7FC00001, 0xFFC00000, 0x7F800001, 1])
ROWS = st.lists(st.lists(SPECIAL | st.integers(0, 2**32 - 1), max_size=5), min_size=4, max_size=4)


def same(a: Column, b: Column) -> bool:
    lengths = (a.lengths is None) == (b.lengths is None) and (a.lengths is None or np.array_equal(a.lengths, b.lengths))
    return lengths and a.values.dtype == b.values.dtype and a.values.tobytes() == b.values.tobytes()


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "step.parquet"
    path.write_bytes(to_parquet(COLUMNS))
    read = from_parquet(path)
    assert list(read) == [field.name for field in FIELDS]
    assert [name for name in COLUMNS if not same(COLUMNS[name], read[name])] == []


@given(ROWS, st.lists(st.integers(0, 2**64 - 1), min_size=4, max_size=4))
@settings(max_examples=50, deadline=None)
def test_every_bit_of_a_float_survives(
    tmp_path_factory: pytest.TempPathFactory, rows: list[list[int]], bits: list[int]
) -> None:
    """NaN payloads, signed zeros and infinities included, also where values repeat."""
    path = tmp_path_factory.getbasetemp() / "bits.parquet"
    values = np.array([word for row in rows for word in row], dtype=np.uint32).view(np.float32)
    changed = {
        **COLUMNS,
        "train_log_probs": Column(values, np.array([len(row) for row in rows], dtype=np.int64)),
        "reward": Column(np.array(bits, dtype=np.uint64).view(np.float64)),
        "seed": Column(np.array(bits, dtype=np.uint64)),
    }
    path.write_bytes(to_parquet(changed))
    read = from_parquet(path)
    assert [name for name in changed if not same(changed[name], read[name])] == []


def test_strangers_read_it(tmp_path: Path) -> None:
    path = tmp_path / "step.parquet"
    path.write_bytes(to_parquet(COLUMNS))
    table = pq.read_table(path)
    assert table.column("response_text").to_pylist() == [s.response_text for s in STEP.samples]
    assert table.column("response_tokens").to_pylist() == [list(s.response_tokens) for s in STEP.samples]


def test_missing_and_damaged_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"cannot read .*absent\.parquet"):
        from_parquet(tmp_path / "absent.parquet")
    data = to_parquet(COLUMNS)
    zeroed = data[:4] + bytes(len(data) - 12) + data[-8:]
    for name, spoiled in {"cut": data[:-20], "empty": b"", "text": b"hello", "zeroed": zeroed}.items():
        (tmp_path / name).write_bytes(spoiled)
        with pytest.raises(RecordError, match=f"cannot read .*{name}") as caught:
            from_parquet(tmp_path / name)
        assert caught.value.code == "VIME-RECORD-006"


def rewritten(tmp_path: Path, change: object) -> Path:
    path = tmp_path / "step.parquet"
    path.write_bytes(to_parquet(COLUMNS))
    pq.write_table(change(pq.read_table(path)), path)  # type: ignore[operator]
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.drop_columns(["reward"]), "'reward' is missing instead of double"),
        (lambda t: t.set_column(0, "prompt_index", t.column(0).cast("int32")), "'prompt_index' is int32"),
        (
            lambda t: t.set_column(13, "reward", pa.array([1.0, None, 2.0, 3.0])),
            "'reward' is double .* without nulls",
        ),
        (
            lambda t: t.set_column(3, "prompt_tokens", pa.array([[1], [None], [2], [3]], pa.list_(pa.int32()))),
            "'prompt_tokens' is list",
        ),
    ],
    ids=["dropped", "narrowed", "null", "null in a list"],
)
def test_other_columns_are_refused(tmp_path: Path, change: object, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        from_parquet(rewritten(tmp_path, change))


def test_a_column_s_name_that_is_no_text_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "step.parquet"
    path.write_bytes(to_parquet(COLUMNS).replace(b"prompt_index", b"\xe5rompt_index"))
    with pytest.raises(RecordError, match=r"cannot read .*step\.parquet"):
        from_parquet(path)
