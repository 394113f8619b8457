"""A disk that is full at any kind of write: the run ends with one error, keeps what was complete, and goes on later."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from stopping import REFUSED, forked, left, resume_and_compare, run, run_on_a_full_disk

from vime_core.record.reader import RunRecord

pytestmark = pytest.mark.slow
ALWAYS = 10**6
FIRST_RECORD = 7
"""The write point from which on there is a manifest, and so a record."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("full")


@pytest.fixture(scope="module")
def kinds(place: Path) -> dict[tuple[str, str], int]:
    """Of every kind of write the number of the last one, and beside the records a run that was never stopped."""
    assert forked(run, place / "whole", place / "cache") == 0
    points = json.loads((place / "whole.points").read_text())
    writes = [(number, *point) for number, point in enumerate(points, 1) if point[0] != "opened"]
    return {(point, re.sub("[0-9]+", "N", name)): number for number, point, name in writes}


def test_a_full_disk_ends_a_run_that_goes_on_later(place: Path, kinds: dict[tuple[str, str], int]) -> None:
    assert len(kinds) > 12
    for turn, (kind, number) in enumerate(kinds.items()):
        if number < FIRST_RECORD:
            continue
        record, for_good = place / str(number), turn % 2 == 1
        last = ALWAYS if for_good else number
        assert forked(run_on_a_full_disk, record, place / "cache", number, last) == REFUSED, kind
        found = RunRecord.open(record)
        assert found.check().findings == (), kind
        if not for_good:
            assert found.manifest.status == "failed", kind
            assert "VIME-RECORD-002: no space to write" in found.manifest.error, kind
        assert list((record / "checkpoints").glob(".*")) == [], kind
        code = forked(resume_and_compare, record, place / "whole", left(record))
        assert code == (REFUSED if found.manifest.status == "complete" else 0), kind
        shutil.rmtree(record)


@pytest.mark.parametrize("number", [1, 2, 5])
def test_what_is_no_record_yet_does_not_stand_in_the_way(
    place: Path, kinds: dict[tuple[str, str], int], number: int
) -> None:
    record = place / f"start-{number}"
    assert forked(run_on_a_full_disk, record, place / "cache", number, number) == REFUSED
    assert not record.exists()
