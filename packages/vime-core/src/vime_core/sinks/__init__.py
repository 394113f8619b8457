"""Metric sinks: where a run's numbers are shown. The record is not a sink; it is always written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Sink(Protocol):
    """Receives the metrics of each step."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def rewind(self, step: int) -> None:
        """A run that was stopped goes on with ``step``: forget what was logged from it on; it comes again."""
        ...

    def close(self) -> None: ...
