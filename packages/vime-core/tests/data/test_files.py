from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from vime_core.data import Dataset, Example, Message
from vime_core.data.files import JsonlOptions, ParquetOptions, open_jsonl, open_parquet
from vime_core.errors import DataError

QUESTION = {"question": "2 + 3?", "answer": "2 and 3 make 5.\n#### 5"}
CHAT = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 3?"}], "label": "5"}
Write = Callable[[Path, list[dict[str, Any]]], None]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    pq.write_table(pa.Table.from_pylist(rows), path)  # pyright: ignore


def opened(kind: str, path: Path, **options: Any) -> Dataset:
    if kind == "jsonl":
        return open_jsonl(JsonlOptions(path=path, **options))
    return open_parquet(ParquetOptions(path=path, **options))


@pytest.fixture(params=["jsonl", "parquet"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def saved(kind: str, tmp_path: Path, rows: list[dict[str, Any]]) -> Path:
    path = tmp_path / f"data.{kind}"
    (write_jsonl if kind == "jsonl" else write_parquet)(path, rows)
    return path


def test_question_and_answer_with_the_gsm8k_marker(kind: str, tmp_path: Path) -> None:
    rows = [QUESTION, {"question": "Größe?", "answer": "a #### b\n#### 1,234 "}]
    dataset = opened(kind, saved(kind, tmp_path, rows))
    assert [dataset[i] for i in range(len(dataset))] == [
        Example((Message("user", "2 + 3?"),), "5"),
        Example((Message("user", "Größe?"),), "1,234"),
    ]


def test_messages_and_label(kind: str, tmp_path: Path) -> None:
    dataset = opened(kind, saved(kind, tmp_path, [CHAT]))
    assert dataset[0] == Example((Message("system", "Be brief."), Message("user", "2 + 3?")), "5")


def test_configured_columns_and_metadata(kind: str, tmp_path: Path) -> None:
    path = saved(kind, tmp_path, [{"prompt": "2 + 3?", "target": 5, "level": {"hard": False}, "other": 1}])
    dataset = opened(kind, path, prompt_key="prompt", label_key="target", metadata_keys=("level",))
    assert dataset[0] == Example((Message("user", "2 + 3?"),), "5", {"level": {"hard": False}})


def test_the_marker_can_be_changed_or_switched_off(kind: str, tmp_path: Path) -> None:
    path = saved(kind, tmp_path, [{"question": "q", "answer": "x => 7"}])
    assert opened(kind, path, label_marker="=>")[0].label == "7"
    assert opened(kind, path, label_marker="")[0].label == "x => 7"
    with pytest.raises(DataError, match="has no '####'"):
        opened(kind, path)


def test_a_missing_file_is_named(kind: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere") as caught:
        opened(kind, tmp_path / "nowhere")
    assert caught.value.code == "VIME-DATA-001"


def test_a_directory_is_no_file(kind: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="directory"):
        opened(kind, tmp_path)


@pytest.mark.parametrize("content", ["", "\n  \n"])
def test_an_empty_jsonl_file(content: str, tmp_path: Path) -> None:
    (tmp_path / "empty").write_text(content)
    with pytest.raises(DataError, match="is empty"):
        opened("jsonl", tmp_path / "empty")


def test_an_empty_parquet_file(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    pq.write_table(
        pa.table({"question": pa.array([], pa.string()), "answer": pa.array([], pa.string())}), tmp_path / "none"
    )  # pyright: ignore
    for name in ("empty", "none"):
        with pytest.raises(DataError, match="is empty"):
            opened("parquet", tmp_path / name)


@pytest.mark.parametrize("damage", ["head", "middle", "text"])
def test_a_corrupt_parquet_file(damage: str, tmp_path: Path) -> None:
    path = saved("parquet", tmp_path, [{"question": f"q{i}" * 50, "answer": f"#### {i * 7919}"} for i in range(500)])
    content = bytearray(path.read_bytes())
    if damage == "head":
        del content[-200:]
    elif damage == "middle":
        content[10:2000] = bytes(1990)
    else:
        content = bytearray(b'{"question": "q", "answer": "#### 1"}\n')
    path.write_bytes(content)
    with pytest.raises(DataError, match="not a readable Parquet file"):
        opened("parquet", path)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (b"{'question': 1}", "not valid JSON"),
        (b'["a", "list"]', "expected a JSON object, found list"),
        (b'{"question": "q", "answer": "\xff#### 1"}', "can't decode"),
        (b'{"question": "q", "answer": NaN}', "NaN is not JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"question": "q"}', "has no column 'answer'; found: question"),
        (b'{"question": "q", "answer": "no marker"}', "has no '####'"),
        (b'{"question": "q", "answer": "#### "}', "the label is empty"),
        (b'{"question": "q", "answer": 4.5}', "expected a string or an integer, found float"),
        (b'{"question": "q", "answer": true}', "expected a string or an integer, found bool"),
        (b'{"question": 7, "answer": "#### 1"}', "expected a string or a list of messages, found 7"),
    ],
)
def test_a_bad_line_is_named_by_number(bad: bytes, message: str, tmp_path: Path) -> None:
    good = json.dumps(QUESTION).encode()
    (tmp_path / "data").write_bytes(good + b"\n\n" + bad + b"\n" + good)
    with pytest.raises(DataError) as caught:
        opened("jsonl", tmp_path / "data")
    assert "line 3" in caught.value.message
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "expected a string or a list"),
        (["hello"], "needs a role"),
        ([{"role": "bot", "content": "hi"}], "needs a role"),
        ([{"role": "user", "content": ["hi"]}], "needs a string as content"),
        ([{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], "nothing left to generate"),
    ],
)
def test_bad_messages(messages: list[Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        opened("jsonl", saved("jsonl", tmp_path, [{"messages": messages, "label": "1"}]))


def test_a_bad_parquet_row_is_named_by_number(tmp_path: Path) -> None:
    path = saved("parquet", tmp_path, [QUESTION, {"question": None, "answer": "#### 1"}])
    with pytest.raises(DataError, match="row 1"):
        opened("parquet", path)


def test_unknown_columns_are_listed(kind: str, tmp_path: Path) -> None:
    path = saved(kind, tmp_path, [{"prompt": "q", "solution": "1"}])
    with pytest.raises(DataError, match="neither question/answer nor messages/label; found: prompt, solution"):
        opened(kind, path)


def test_two_forms_at_once_are_ambiguous(kind: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="both") as caught:
        opened(kind, saved(kind, tmp_path, [{**QUESTION, **CHAT}]))
    assert "prompt_key" in caught.value.remedy


def test_a_misspelt_key_gets_the_nearest_column(kind: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no column 'promt'") as caught:
        opened(kind, saved(kind, tmp_path, [{"prompt": "q", "label": "1"}]), prompt_key="promt", label_key="label")
    assert "Did you mean 'prompt'?" in caught.value.remedy


def test_metadata_that_is_not_json_is_refused(tmp_path: Path) -> None:
    path = saved("parquet", tmp_path, [{**QUESTION, "image": b"\x00"}])
    with pytest.raises(DataError, match="column 'image' holds no JSON value"):
        opened("parquet", path, metadata_keys=("image",))
    assert len(opened("parquet", path)) == 1


def test_one_key_alone_is_a_configuration_error() -> None:
    with pytest.raises(ValidationError, match="set together"):
        JsonlOptions(path=Path("x"), prompt_key="prompt")


def test_messages_name_the_key_in_full(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"question": "1+1", "answer": "2"}')
    with pytest.raises(DataError, match=r"data\.jsonl\.label_marker"):
        open_jsonl(JsonlOptions(path=file))
    with pytest.raises(ValueError, match=r"data\.parquet\.prompt_key and data\.parquet\.label_key"):
        ParquetOptions(path=file, label_key="answer")


def test_an_empty_question_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"question": " ", "answer": "#### 2"}')
    with pytest.raises(DataError, match="line 1: column 'question': the prompt is empty"):
        open_jsonl(JsonlOptions(path=file))


@pytest.mark.parametrize("content", ["", " \n"])
def test_a_message_without_content_is_refused(content: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    good = {"role": "user", "content": "2 + 2"}
    rows = [
        {"messages": [good], "label": "4"},
        {"messages": [{"role": "system", "content": content}, good], "label": "4"},
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(DataError, match="line 2: column 'messages': the content of message 0 is empty"):
        open_jsonl(JsonlOptions(path=file))
