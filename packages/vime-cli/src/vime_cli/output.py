"""How commands print: text for people on standard output, one JSON document with ``--json``."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Generator
from contextlib import contextmanager, redirect_stdout
from typing import Any, TextIO

from vime_core.errors import Interrupted, VimeError


def show_progress(level: int) -> None:
    """What a run says of its phases, and its warnings, go to standard error from ``level`` on."""
    log = logging.getLogger("vime")
    log.setLevel(level)
    log.handlers = [logging.StreamHandler(sys.stderr)]
    log.propagate = False


_documents: list[TextIO] = []


def print_json(document: Any) -> None:
    """One JSON document on standard output; NaN is refused rather than written as no JSON."""
    print(json.dumps(document, indent=2, allow_nan=False, default=str), file=_documents[-1] if _documents else None)


@contextmanager
def document_only() -> Generator[None]:
    """Meanwhile standard output takes `print_json`'s document; what else is printed goes to standard error."""
    _documents.append(sys.stdout)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _documents.pop()


def print_error(error: VimeError, *, as_json: bool) -> None:
    """An error of the user's making: code, what, and help."""
    if as_json:
        print_json({"error": error_table(error)})
    else:
        print("\n  note: ".join([f"error {error}", *notes(error)]), file=sys.stderr)


def print_interruption(error: Interrupted, *, as_json: bool) -> None:
    """One line: which signal, and what was kept where."""
    said = f"{error}: {'; '.join(notes(error)) or 'nothing was recorded'}"
    if as_json:
        remedy = "Start it again, or go on from a checkpoint: vime run --resume RECORD."
        print_json({"error": {"code": "VIME-CLI-002", "message": said, "help": remedy}})
    else:
        print(said, file=sys.stderr)


def notes(error: BaseException) -> list[str]:
    """What was added to an exception on its way."""
    return list(getattr(error, "__notes__", ()))


def error_table(error: VimeError) -> dict[str, str]:
    """An error in a JSON document."""
    return {"code": error.code, "message": error.message, "help": error.remedy}
