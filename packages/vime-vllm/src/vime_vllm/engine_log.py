"""One file for everything that vLLM says while a run uses it, so that the terminal stays vime's."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from multiprocessing import spawn
from pathlib import Path
from typing import Final

from vime_core.scratch import outside
from vime_vllm.compat import settle_logging
from vime_vllm.environment import QUIET

_FORMAT: Final = "(driver) %(levelname)s %(name)s: %(message)s"
_LOGGER: Final = "vllm"


class EngineLog:
    """A log file; what vLLM logs in this process goes there from now on.

    It stands in the record where there is one, else in a directory of its own, which outlives the run's other temporary
    files when the engine fails. Errors, and everything where the user set ``VLLM_LOGGING_LEVEL``, still reach the
    terminal.
    """

    def __init__(self, record: Path | None = None, engine: int = 0) -> None:
        self._own = record is None or not record.is_dir()
        place = Path(tempfile.mkdtemp(prefix="vime-vllm-", dir=outside())) if self._own else record
        assert place is not None
        self.path = place / (f"engine-{engine}.log" if engine else "engine.log")
        self._handler = logging.FileHandler(self.path)
        self._handler.setFormatter(logging.Formatter(_FORMAT))
        # Before vLLM is imported: Python itself prints the warnings of a logger without a handler.
        logging.getLogger(_LOGGER).addHandler(self._handler)

    @contextmanager
    def taking_children(self) -> Generator[None]:
        """Processes that ``multiprocessing`` spawns meanwhile write to the file from their first byte on."""
        workshop = Path(tempfile.mkdtemp(prefix="vime-engine-"))
        launcher = workshop / "python"
        launcher.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@" >>"{self.path}" 2>&1\n')
        launcher.chmod(0o700)
        before = spawn.get_executable()
        # Where the directory's disk runs no programs, the children write to the terminal.
        if os.access(launcher, os.X_OK):
            spawn.set_executable(str(launcher))
        try:
            yield
        finally:
            spawn.set_executable(before)
            shutil.rmtree(workshop, ignore_errors=True)

    def take_front_end(self) -> None:
        """Keep vLLM's own handlers in this process to errors; call in the environment that the engine starts with."""
        settle_logging()
        logger = logging.getLogger(_LOGGER)
        if os.environ.get("VLLM_LOGGING_LEVEL", QUIET) == QUIET:
            for handler in logger.handlers:
                handler.setLevel(logging.ERROR)
        self._handler.setLevel(logging.NOTSET)
        logger.addHandler(self._handler)

    def release_front_end(self) -> None:
        """What vLLM logs in this process no longer goes to the file."""
        logging.getLogger(_LOGGER).removeHandler(self._handler)
        self._handler.close()

    def remove(self) -> None:
        """Delete the file, and its directory where that is its own."""
        self.release_front_end()
        self.path.unlink(missing_ok=True)
        if self._own:
            shutil.rmtree(self.path.parent, ignore_errors=True)
