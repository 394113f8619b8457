"""A sink of a tool that keeps runs by name: what it needs to know is in the record's manifest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vime_core.record.layout import MANIFEST
from vime_core.record.schema import Manifest


@dataclass(frozen=True)
class RunFacts:
    """``identity`` is the record's; ``config`` the resolved configuration."""

    name: str
    identity: str
    config: Mapping[str, Any]

    def named(self, first_step: int) -> str:
        """A name of its own for each time that the run was begun or resumed: none of these tools takes a step back."""
        own = f"{self.name}-{self.identity[:8]}"
        return f"{own}-from-step-{first_step}" if first_step else own


def run_facts(directory: Path) -> RunFacts:
    """Of the run whose record is here."""
    manifest = Manifest.model_validate_json((directory / MANIFEST).read_bytes())
    return RunFacts(str(manifest.config["run"]["name"]), manifest.run_id, manifest.config)


class NamedRunSink:
    """A run of such a tool, and another one of the same group each time that the run is resumed.

    Args:
        directory: of the record.
        start: (facts, name) to the tool's run, which has ``log(metrics, step=)`` and ``finish()``; called when the
            first metrics are there.
    """

    def __init__(self, directory: Path, start: Callable[[RunFacts, str], Any]) -> None:
        self._facts = run_facts(directory)
        self._start = start
        self._run: Any = None
        self._first_step = 0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._run is None:
            self._run = self._start(self._facts, self._facts.named(self._first_step))
        self._run.log(dict(metrics), step=step)

    def rewind(self, step: int) -> None:
        self.close()
        self._first_step = step

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None
