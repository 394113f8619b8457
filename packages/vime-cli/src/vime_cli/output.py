"""How commands print: text for people on standard output, one JSON document with ``--json``."""

from __future__ import annotations

import json
import sys
from typing import Any

from vime_core.errors import VimeError


def print_json(document: Any) -> None:
    """One JSON document on standard output; NaN is refused rather than written as no JSON."""
    print(json.dumps(document, indent=2, allow_nan=False, default=str))


def print_error(error: VimeError, *, as_json: bool) -> None:
    """An error of the user's making: code, what, and help."""
    if as_json:
        print_json({"error": error_table(error)})
    else:
        print(f"error {error}", file=sys.stderr)


def error_table(error: VimeError) -> dict[str, str]:
    """An error in a JSON document."""
    return {"code": error.code, "message": error.message, "help": error.remedy}
