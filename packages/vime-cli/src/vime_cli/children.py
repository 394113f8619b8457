"""Runs that a verdict starts: they end when it does, however that ends."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from typing import Final

from vime_cli.signals import PARENT

END_S: Final = 60.0
"""Longest wait for a run that was asked to end: it closes its engine."""


def run_child(command: Sequence[str], *, quiet: bool) -> tuple[int, str]:
    """Exit code and, when quiet, standard error of a ``vime`` command."""
    # A session of its own, so that Ctrl-C reaches it once and through this process.
    child = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE if quiet else None,
        text=True,
        env={**os.environ, PARENT: str(os.getpid())},
        start_new_session=True,
    )
    try:
        said = child.communicate()[1]
    except BaseException:
        child.terminate()
        try:
            child.wait(END_S)
        except subprocess.TimeoutExpired:
            child.kill()
        raise
    return child.returncode, said or ""


def set_options(overrides: Sequence[str]) -> list[str]:
    """The overrides as ``--set`` options of another ``vime`` command."""
    return [part for override in overrides for part in ("--set", override)]
