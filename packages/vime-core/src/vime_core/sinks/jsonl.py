"""``metrics.jsonl`` in the record directory: the numbers for people and plots. No verdict rests on it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel

from vime_core.record.files import write_whole


class JsonlSink:
    """Appends one JSON object a step."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._stream = file.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._stream.write(json.dumps({"step": step, **metrics}) + "\n")
        self._stream.flush()

    def rewind(self, step: int) -> None:
        self._stream.close()
        lines = self._file.read_bytes().splitlines(keepends=True)
        write_whole(self._file, b"".join(line for line in lines if line.endswith(b"\n") and _step(line) < step))
        self._stream = self._file.open("a", encoding="utf-8")

    def close(self) -> None:
        self._stream.close()


def _step(line: bytes) -> int:
    return json.loads(line)["step"]


def open_sink(options: BaseModel, directory: Path) -> JsonlSink:
    """The factory that the registration names."""
    del options
    return JsonlSink(directory / "metrics.jsonl")
