"""Names of a record's files."""

from __future__ import annotations

from pathlib import Path
from typing import Final

MANIFEST: Final = "manifest.json"
STEPS: Final = "steps.jsonl"
METRICS: Final = "metrics.jsonl"
SEAL: Final = "seal.json"
SAMPLES: Final = "samples"
EVALUATION: Final = "evaluation"
TAPS: Final = "taps"
CHECKPOINTS: Final = "checkpoints"
STATE: Final = "state.json"
TOP_FILES: Final = (MANIFEST, STEPS, METRICS)
FOLDERS: Final = (SAMPLES, EVALUATION, TAPS)
"""What belongs to a record, besides checkpoints: nothing may be added to it once it is sealed."""
RESERVE: Final = ".reserve"
"""Bytes that are given up when the disk is full, so that the manifest can still say how the run ended."""


def samples_path(directory: Path, step: int) -> Path:
    """The Parquet file of a step's samples."""
    return directory / SAMPLES / f"step-{step:06d}.parquet"


def evaluation_path(directory: Path, step: int) -> Path:
    """The Parquet file of the responses of the evaluation before a step."""
    return directory / EVALUATION / f"step-{step:06d}.parquet"


def taps_folder(directory: Path, step: int) -> Path:
    """The folder of a step's taps."""
    return directory / TAPS / f"step-{step:06d}"
