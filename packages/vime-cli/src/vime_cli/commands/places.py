"""Where the records of a verdict that runs a configuration go."""

from __future__ import annotations

from pathlib import Path

from vime_core.errors import ConfigError


def new_directory(output: Path, directory: Path | None, verdict: str) -> Path:
    """``directory``, or a free one beside ``run.output``, made with its parents.

    Raises:
        ConfigError: ``directory`` exists.
    """
    chosen = directory or _free(output, verdict)
    if chosen.exists():
        raise ConfigError(
            f"--directory {str(chosen)!r} exists", remedy="Name one that does not exist.", code="VIME-CONFIG-009"
        )
    chosen.mkdir(parents=True)
    return chosen


def _free(output: Path, verdict: str) -> Path:
    number = 1
    while (candidate := output.with_name(f"{output.name}-{verdict}-{number:03d}")).exists():
        number += 1
    return candidate
