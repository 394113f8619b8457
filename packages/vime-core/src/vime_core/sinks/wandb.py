"""Weights & Biases, offline: its files lie below ``wandb/`` in the record, and ``wandb sync`` uploads them.

Importing this module imports wandb. Nothing leaves the machine unless the environment says ``WANDB_MODE=online``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel

from vime_core.sinks.run import run_facts

_wandb: Any = import_module("wandb")

PROJECT: Final = "vime"
QUIET: Final[Mapping[str, Any]] = {
    "console": "off",
    "disable_git": True,
    "save_code": False,
    "silent": True,
    "x_disable_machine_info": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
}
"""Only metrics and configuration are kept: no console, code, requirements or machine."""


class WandbSink:
    """A run of W&B, and another one of the same group each time that the run is resumed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._facts = run_facts(directory)
        self._run: Any = None
        self._first_step = 0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._run is None:
            self._run = self._open()
        self._run.log(dict(metrics), step=step)

    def rewind(self, step: int) -> None:
        self.close()
        self._first_step = step

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None

    def _open(self) -> Any:
        return _wandb.init(
            project=PROJECT,
            name=self._facts.named(self._first_step),
            group=self._facts.name,
            dir=str(self._directory),
            mode=os.environ.get("WANDB_MODE", "offline"),
            config=dict(self._facts.config),
            settings=_wandb.Settings(**QUIET),
        )


def open_sink(options: BaseModel, directory: Path) -> WandbSink:
    """The factory that the registration names."""
    del options
    return WandbSink(directory)
