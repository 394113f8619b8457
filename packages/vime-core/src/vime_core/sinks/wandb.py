"""Weights & Biases, offline: its files lie below ``wandb/`` in the record, and ``wandb sync`` uploads them.

Importing this module imports wandb. Nothing leaves the machine unless the environment says ``WANDB_MODE=online``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel

from vime_core.sinks.run import NamedRunSink, RunFacts

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


def open_sink(options: BaseModel, directory: Path) -> NamedRunSink:
    """The factory that the registration names."""
    del options
    return NamedRunSink(directory, partial(_start, directory))


def _start(directory: Path, facts: RunFacts, name: str) -> Any:
    return _wandb.init(
        project=PROJECT,
        name=name,
        group=facts.name,
        dir=str(directory),
        mode=os.environ.get("WANDB_MODE", "offline"),
        config=dict(facts.config),
        settings=_wandb.Settings(**QUIET),
    )
