"""A manifest's contract in a word."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final, cast

_DIGITS: Final = 12


def contract_name(text: str) -> str:
    """The contract's id and the first digits of its digest (SHA-256 of the canonical JSON); ``none`` without one."""
    return f"{_id(text)} ({hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]})" if text else "none"


def _id(text: str) -> str:
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError):
        return "not readable"
    return str(cast("dict[str, Any]", found).get("id", "named")) if isinstance(found, dict) else "named"
