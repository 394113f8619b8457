"""``metrics.jsonl`` in the record directory: the numbers for people and plots. Verdicts never read it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel


class JsonlSink:
    """Appends one JSON object a step."""

    def __init__(self, file: Path) -> None:
        self._stream = file.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._stream.write(json.dumps({"step": step, **metrics}) + "\n")
        self._stream.flush()

    def close(self) -> None:
        self._stream.close()


def open_sink(options: BaseModel, directory: Path) -> JsonlSink:
    """The factory that the registration names."""
    del options
    return JsonlSink(directory / "metrics.jsonl")
