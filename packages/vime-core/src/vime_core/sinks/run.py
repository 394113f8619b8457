"""What a sink that keeps runs by name needs to know of its run, from the record's manifest."""

from __future__ import annotations

from collections.abc import Mapping
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
