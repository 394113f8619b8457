"""A run's metric sinks, each named by its plugin when it fails."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vime_core.plugins.manager import PluginManager
from vime_core.plugins.types import MetricSink, Options
from vime_core.sinks import Sink


class GuardedSink:
    """A `vime_core.sinks.Sink` of a plugin. Raises PluginFailed where the plugin's code raises."""

    def __init__(self, plugins: PluginManager, entry: MetricSink, directory: Path) -> None:
        self._plugins, self._entry = plugins, entry
        open_sink: Any = entry.load()
        with plugins.guarding(entry):
            self._sink: Sink = open_sink(Options(), directory)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        with self._plugins.guarding(self._entry):
            self._sink.log(step, metrics)

    def rewind(self, step: int) -> None:
        with self._plugins.guarding(self._entry):
            self._sink.rewind(step)

    def close(self) -> None:
        with self._plugins.guarding(self._entry):
            self._sink.close()
