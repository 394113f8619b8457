"""A negative control for replays: in a run named ``faulty`` one norm of the live trainer has another epsilon.

A run's name decides nothing and is no input, so the two configurations are equal.
"""

from __future__ import annotations

from typing import Any

from vime_core.backends import Trainer
from vime_core.config.schema import RunConfig
from vime_core.plugins import hookimpl

NORM = "decoder.layers.1.pre_mlp_layernorm"
_faulty = False


@hookimpl
def vime_before_run(config: RunConfig) -> None:
    global _faulty
    _faulty = config.run.name == "faulty"


@hookimpl
def vime_before_log_probs(step: int, trainer: Trainer) -> None:
    if _faulty and step == 1:
        live: Any = trainer
        dict(live._model.named_modules())[NORM].eps = 1e-2
