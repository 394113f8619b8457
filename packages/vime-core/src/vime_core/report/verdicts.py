"""Verdicts that a report shows: computed against another record, or read from what ``vime verify --json`` printed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

from vime_core.errors import RecordError
from vime_core.record.reader import RunRecord
from vime_core.verify.repeat import verify_repeat


@dataclass(frozen=True)
class ShownVerdict:
    """A verdict in words. ``source`` says where it comes from; ``holds`` is None where it could not be checked."""

    name: str
    holds: bool | None
    sentence: str
    source: str


def against(record: RunRecord, other: RunRecord) -> ShownVerdict:
    """Whether two records are the same bits, checked now."""
    verdict = verify_repeat(record, other)
    return ShownVerdict(verdict.name, verdict.holds, verdict.sentence, f"checked against {other.directory.name}")


def read_verdicts(file: Path) -> list[ShownVerdict]:
    """The verdicts of a file that holds the output of ``vime verify ... --json``, taken at its word.

    Raises:
        RecordError: the file cannot be read, or holds something else.
    """
    try:
        document: Any = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        _refuse(file, str(error))
    if not isinstance(document, dict):
        _refuse(file, "it is no JSON object")
    table = cast("dict[str, Any]", document)
    several: Any = table.get("verdicts", [table])
    if not isinstance(several, list):
        _refuse(file, f"its verdicts are no list, but {json.dumps(several)[:80]}")
    return [_shown(one, file) for one in cast("list[Any]", several)]


def _shown(one: Any, file: Path) -> ShownVerdict:
    table = cast("dict[str, Any]", one) if isinstance(one, dict) else {}
    name, holds, sentence = (table.get(key) for key in ("name", "holds", "sentence"))
    if not (isinstance(name, str) and isinstance(sentence, str) and isinstance(holds, bool | None)):
        _refuse(file, "it holds no name, holds and sentence of a verdict")
    return ShownVerdict(name, holds, sentence, f"as {file.name} says")


def _refuse(file: Path, what: str) -> NoReturn:
    raise RecordError(
        f"{str(file)!r} is no output of vime verify --json: {what}",
        remedy="Write one with: vime verify all CONFIG --json > FILE.",
        code="VIME-RECORD-058",
    )
