"""Names of a record's files."""

from __future__ import annotations

from pathlib import Path
from typing import Final

MANIFEST: Final = "manifest.json"
STEPS: Final = "steps.jsonl"
SAMPLES: Final = "samples"


def samples_path(directory: Path, step: int) -> Path:
    """The Parquet file of a step's samples."""
    return directory / SAMPLES / f"step-{step:06d}.parquet"
