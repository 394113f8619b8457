"""TensorBoard event files below ``tensorboard/`` in the record directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from vime_core.plugins.types import load_attribute


class TensorBoardSink:
    """One scalar a metric a step."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._writer = self._open(None)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def rewind(self, step: int) -> None:
        self._writer.close()
        self._writer = self._open(step)

    def close(self) -> None:
        self._writer.close()

    def _open(self, purge_step: int | None) -> Any:
        """``purge_step`` makes TensorBoard forget what it was told from that step on."""
        writer = load_attribute("torch.utils.tensorboard:SummaryWriter", "tensorboard")
        return writer(log_dir=str(self._directory), purge_step=purge_step)


def open_sink(options: BaseModel, directory: Path) -> TensorBoardSink:
    """The factory that the registration names.

    Raises:
        PluginError: torch or tensorboard is not installed.
    """
    del options
    return TensorBoardSink(directory / "tensorboard")
