"""Checkpoints of a run: written beside the record, complete or absent."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from vime_core.backends import Trainer


@dataclass(frozen=True)
class LoopState:
    """What the loop itself must remember; data order and seeds are functions of these."""

    next_step: int
    weight_version: int
    run_seed: int
    weights_root: str


def checkpoint_directory(record: Path, step: int) -> Path:
    """Where the checkpoint after ``step`` steps lies."""
    return record / "checkpoints" / f"step-{step:06d}"


def write_checkpoint(trainer: Trainer, record: Path, step: int, state: LoopState) -> Path:
    """Write trainer state and loop state, then give the directory its name: a half-written one never has it."""
    final = checkpoint_directory(record, step)
    partial = final.with_name(f".{final.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    (partial / "trainer").mkdir(parents=True)
    trainer.save(partial / "trainer")
    (partial / "state.json").write_text(json.dumps(asdict(state), indent=2) + "\n")
    _sync_tree(partial)
    partial.rename(final)
    _sync(final.parent)
    return final


def _sync_tree(directory: Path) -> None:
    for path in sorted(directory.rglob("*")):
        _sync(path)
    _sync(directory)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
