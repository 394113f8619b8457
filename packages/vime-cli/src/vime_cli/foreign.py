"""Errors that are not vime's own: a command line that is wrong, and code that raised what nobody caught."""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Final

from vime_core.errors import ConfigError, PluginFailed, VimeError
from vime_core.plugins.foreign import describe_foreign, out_of_gpu_memory, place_of, text_of, with_notes

SHOW: Final = "VIME_TRACEBACK"
"""Environment variable that asks for the traceback of an unexpected error."""


def usage_error(error: BaseException) -> VimeError:
    """What click says of a command line that is wrong."""
    said = getattr(error, "format_message", lambda: str(error))()
    return ConfigError(said, remedy="See vime COMMAND --help.", code="VIME-CLI-001")


def unexpected(error: BaseException) -> VimeError:
    """What is said of an exception that came up to the top, with its notes."""
    if os.environ.get(SHOW):
        traceback.print_exception(error, file=sys.stderr)
    if memory := out_of_gpu_memory(text_of(error), "the run"):
        memory.add_note(f"raised in {place_of(error)}")
        return with_notes(memory, error)
    return with_notes(_foreign(error), error)


def _foreign(error: BaseException) -> VimeError:
    """An exception that came up to the top, with the distribution whose code raised it."""
    origin = next(_origins(error), "vime or Python itself")
    return PluginFailed(
        f"code of {origin} failed: {describe_foreign(error)}",
        remedy=f"Report it to the authors of {origin}; {SHOW}=1 shows the whole traceback.",
        code="VIME-CLI-003",
    )


def raised_by_typer(error: SystemExit) -> bool:
    """Whether typer itself ended the command, as it does after it installed a shell's completion."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return str(frames[-1].f_globals.get("__name__", "")).partition(".")[0] in ("typer", "click")


def _origins(error: BaseException) -> Iterator[str]:
    """The distributions and files that a traceback runs through, innermost first, without Python's own."""
    standard = Path(sysconfig.get_path("stdlib")).resolve()
    owners = packages_distributions()
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        name = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        file = Path(frame.f_code.co_filename)
        if name in owners:
            yield owners[name][0]
        elif file.is_file() and standard not in file.resolve().parents:
            yield str(file)
