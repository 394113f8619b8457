"""The verdict *resume*: killed and resumed, the same bits as never stopped?"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from vime_core.record.reader import RunRecord
from vime_core.verify.repeat import verify_repeat
from vime_core.verify.verdict import Verdict

NAME: Final = "resume"


def verify_resume(whole: RunRecord, resumed: RunRecord) -> Verdict:
    """Compare a run that was never stopped with one that was killed and resumed, in every digest of every step.

    Holds when the two repeat each other (`vime_core.verify.repeat`) and the second really went on from a checkpoint,
    with steps after it that no earlier process had done.

    Raises:
        RecordError: a record is damaged beyond reading.
    """
    verdict = verify_repeat(whole, resumed)
    verdict = replace(verdict, name=NAME, sentence=verdict.sentence.replace("Repeat", "Resume", 1))
    if not verdict.holds:
        return verdict
    if why := _not_resumed(whole, resumed):
        sentence = f"Resume could not be checked: {why}."
        return replace(verdict, holds=None, sentence=sentence, first="resumed")
    return replace(verdict, sentence=f"{verdict.sentence} {_extent(resumed)}")


def _not_resumed(whole: RunRecord, resumed: RunRecord) -> str:
    if whole.manifest.resumed:
        return "the run that must not be stopped was resumed too"
    if not any(entry.step for entry in resumed.manifest.resumed):
        return "the second run never went on from a checkpoint"
    if all(entry.recorded >= len(resumed.steps) for entry in resumed.manifest.resumed):
        return "the second run had recorded every step before it was stopped"
    return ""


def _extent(resumed: RunRecord) -> str:
    last = resumed.manifest.resumed[-1]
    return (
        f"The second run was killed with {last.recorded} steps recorded and went on from the checkpoint after step"
        f" {last.step}, in a fresh process."
    )
