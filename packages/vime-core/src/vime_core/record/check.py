"""Does a record agree with itself? Every digest that can be recomputed from what is stored, recomputed.

This finds damage and partial edits. It is no signature: who edits samples, digests and manifest consistently is not
found by one record, only by comparing it with another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from vime_core.errors import RecordError
from vime_core.record.digest import merkle_root
from vime_core.record.layout import SAMPLES, STEPS, samples_path
from vime_core.record.samples import Columns, require_order, sample_keys, stage_digests, update_log_prob_digest
from vime_core.record.schema import Digests, StepEntry

if TYPE_CHECKING:
    from vime_core.record.reader import RunRecord


@dataclass(frozen=True)
class RecordCheck:
    """What was recomputed, and what did not agree (each finding names its place)."""

    findings: tuple[str, ...]
    steps: int
    samples: int

    @property
    def holds(self) -> bool | None:
        """None: nothing could be recomputed."""
        if self.findings:
            return False
        return True if self.steps and self.samples else None


def check_record(record: RunRecord) -> RecordCheck:
    """Recompute the digests of every step from its samples, the roots from their leaves, and count the steps."""
    findings = [*_start_findings(record), *_sequence_findings(record)]
    samples = 0
    for entry in record.steps:
        try:
            columns = record.columns(entry.step)
        except RecordError as error:
            findings.append(f"step {entry.step}: {error.message}")
            continue
        samples += len(columns["reward"].values)
        findings += [f"step {entry.step}: {finding}" for finding in entry_findings(entry, columns)]
    findings += _end_findings(record)
    return RecordCheck(tuple(findings), len(record.steps), samples)


def entry_findings(entry: StepEntry, columns: Columns) -> list[str]:
    """Where a step's line disagrees with its samples or with its own leaves."""
    return [*_sample_findings(entry, columns), *_root_findings(entry), *_float_findings(entry)]


def _sample_findings(entry: StepEntry, columns: Columns) -> Iterator[str]:
    try:
        require_order(sample_keys(columns))
    except RecordError as error:
        yield error.message
    for stage, digest in asdict(stage_digests(columns)).items():
        if getattr(entry, stage) != digest:
            yield f"the digest of {_spoken(stage)} is not that of the stored samples"
    for number, update in enumerate(entry.updates):
        if update.train_log_probs != update_log_prob_digest(columns, number):
            yield f"update {number}: the digest of train log-probs is not that of the stored samples"
    for stray in sorted(set(columns["update"].values.tolist()) - set(range(len(entry.updates)))):
        yield f"samples of update {stray}, which the step does not list"


def _root_findings(entry: StepEntry) -> Iterator[str]:
    for number, update in enumerate(entry.updates):
        yield from _root_finding(f"update {number}: gradients", update.gradients, update.gradients_root)
    yield from _root_finding("weights", entry.weights, entry.weights_root)
    yield from _root_finding("optimizer", entry.optimizer, entry.optimizer_root)


def _root_finding(what: str, leaves: Digests, root: str) -> Iterator[str]:
    try:
        if merkle_root(leaves) != root:
            yield f"{what}: the root is not that of the {len(leaves)} stored digests"
    except RecordError as error:
        yield f"{what}: {error.message}"


def _float_findings(entry: StepEntry) -> Iterator[str]:
    named = {**entry.metrics, **entry.evaluation}
    for number, update in enumerate(entry.updates):
        for name in ("loss", "grad_norm", "learning_rate"):
            named[f"update {number}: {name}"] = getattr(update, name)
    for name, text in named.items():
        try:
            exact = float.fromhex(text).hex() == text
        except (ValueError, OverflowError):
            exact = False
        if not exact:
            yield f"{name} is {text!r}, not a number as float.hex writes it"


def _start_findings(record: RunRecord) -> Iterator[str]:
    manifest = record.manifest
    if manifest.initial_weights or manifest.model_root:
        yield from _root_finding("manifest: initial weights", manifest.initial_weights, manifest.model_root)
    for entry in manifest.resumed:
        if not 0 <= entry.step <= entry.recorded <= len(record.steps):
            yield (
                f"manifest: resumed at step {entry.step} with {entry.recorded} steps recorded,"
                f" and {len(record.steps)} are there"
            )


def _end_findings(record: RunRecord) -> Iterator[str]:
    manifest = record.manifest
    if manifest.status == "running":
        return
    if manifest.steps != len(record.steps):
        yield f"{STEPS}: the manifest counts {manifest.steps} steps, {len(record.steps)} are there"
    elif manifest.steps_digest != record.steps_digest:
        yield f"{STEPS}: its digest is not the one in the manifest"
    if manifest.status == "complete":
        yield from _stray_files(record)


def _sequence_findings(record: RunRecord) -> Iterator[str]:
    numbers = [entry.step for entry in record.steps]
    for before, number in pairwise(numbers):
        if number != before + 1:
            yield f"step {before} is followed by step {number}"


def _stray_files(record: RunRecord) -> Iterator[str]:
    expected = {samples_path(record.directory, entry.step).name for entry in record.steps}
    for path in sorted((record.directory / SAMPLES).glob("*")):
        if path.name not in expected:
            yield f"{SAMPLES}/{path.name} belongs to no step"


def _spoken(stage: str) -> str:
    return stage.replace("rollout_log_probs", "rollout log-probs")
