"""Find an answer in a text: pure string functions, linear in the text's length."""

from __future__ import annotations

import re
from decimal import Decimal

_NUMBER = re.compile(
    r"(?<![A-Za-z0-9])(?<![0-9]\.)"  # not inside a word or a version number
    r"(?:(?<!\))-)?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?"  # 1,234.5; no sign in (2)-3
    r"|(?<![A-Za-z0-9.)])-?\.[0-9]+"  # .5
)
_QUOTES = " \"'`"


def tagged(text: str) -> str:
    """What stands in the last ``<answer>...</answer>`` of a text; empty when there is none."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    return "" if start < 0 else text[start + len("<answer>") : end].strip()


def last_number(text: str) -> Decimal | None:
    """The last decimal number of a text: ``1,234.5``, ``-3``, ``.5``. A minus after a digit or word is no sign."""
    numbers = _NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))
    return Decimal(numbers[-1].replace(",", "")) if numbers else None


def normalised(text: str) -> str:
    """Lower case, single spaces, without quotes around and without a full stop at the end."""
    return " ".join(text.casefold().split()).strip(_QUOTES).rstrip(".").strip(_QUOTES)
