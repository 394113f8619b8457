"""``metrics.jsonl`` in the record directory: the numbers for people and plots. No verdict rests on it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel

from vime_core.record.files import append_whole, write_whole


class JsonlSink:
    """Appends one JSON object a step, whole or not at all. Raises RecordError when it cannot be written."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        append_whole(self._file, json.dumps({"step": step, **metrics}).encode() + b"\n")

    def rewind(self, step: int) -> None:
        lines = self._file.read_bytes().splitlines(keepends=True) if self._file.exists() else []
        write_whole(self._file, b"".join(line for line in lines if line.endswith(b"\n") and _step(line) < step))

    def close(self) -> None:
        """Nothing is held."""


def _step(line: bytes) -> int:
    return json.loads(line)["step"]


def open_sink(options: BaseModel, directory: Path) -> JsonlSink:
    """The factory that the registration names."""
    del options
    return JsonlSink(directory / "metrics.jsonl")
