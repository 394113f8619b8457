"""Writes a run record as the run goes: samples first, then the step's line, each on disk before the next."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

from blake3 import blake3

from vime_core.errors import ContractViolation, Interrupted, RecordError, VimeError
from vime_core.interruption import uninterrupted
from vime_core.record.check import entry_findings, evaluation_findings
from vime_core.record.files import (
    append_whole,
    create_directory,
    cut_file,
    make_folder,
    refuse_existing,
    remove,
    remove_unfinished,
    reserve,
    resume_command,
    write_whole,
)
from vime_core.record.layout import (
    EVALUATION,
    MANIFEST,
    RESERVE,
    SAMPLES,
    SEAL,
    STEPS,
    evaluation_path,
    samples_path,
    taps_folder,
)
from vime_core.record.lock import DirectoryLock
from vime_core.record.parquet import to_parquet
from vime_core.record.reader import RunRecord
from vime_core.record.replacing import replace_steps, settle, write_taps
from vime_core.record.samples import SAMPLE_FIELDS, sample_columns, train_columns
from vime_core.record.schema import Manifest, Status, StepEntry
from vime_core.record.seal import write_seal
from vime_core.record.settings import settings_digest
from vime_core.types import Float32Array, Sample

__all__ = ["RecordWriter", "refuse_existing"]


class RecordWriter:
    """The one writer of a record. A killed process leaves the steps that it finished; nothing is ever overwritten.

    As a context manager it marks the record ``failed`` or ``interrupted`` when the block raises or ends without
    `finish`.
    """

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.directory = directory
        self.manifest = manifest
        self.last_weights_root = ""
        self._lock = DirectoryLock(directory)
        self._recorded: dict[int, StepEntry] = {}
        self._replaced: tuple[tuple[StepEntry, bytes], ...] = ()
        self._next_step: int | None = None
        self._count = self._size = 0
        self._lines = blake3()
        self._digests: dict[int, str] = {}

    def digest_before(self, step: int) -> str:
        """blake3 of the recorded lines before ``step``, which is recorded up to there."""
        return self._digests[step]

    @classmethod
    def create(cls, directory: Path, manifest: Manifest) -> Self:
        """Make the directory (parents included) and write the manifest.

        Raises:
            RecordError: the directory exists, or it cannot be written.
        """
        create_directory(directory)
        try:
            create_directory(directory / SAMPLES)
            writer = cls(directory, manifest)
            writer.update_manifest(run_id=manifest.run_id or secrets.token_hex(16))
        except BaseException:  # what is no record yet does not stand in the way of the next one
            shutil.rmtree(directory, ignore_errors=True)
            raise
        return writer

    @classmethod
    def resume(
        cls, directory: Path, *, found: RunRecord | None = None, replace_from: int | None = None, **changes: Any
    ) -> Self:
        """Go on with the record of a run that was stopped: whatever it left half-written is removed.

        Steps that it finished stay. Writing one of them again compares it with what is recorded.

        Args:
            directory: the record.
            found: it as it was when the place to go on from was chosen; None: that was not before now.
            replace_from: do steps from this one on anew: the first one that is written takes the place of them all.
            changes: fields of the manifest.

        Raises:
            RecordError: it is no record, is damaged, cannot be written, a process still writes it, or one has since it
                was ``found``.
        """
        writer = cls(directory, RunRecord.open(directory).manifest)
        if found is not None:
            _require_unchanged(found)
        make_folder(directory / SAMPLES)
        for place in (directory, directory / SAMPLES, directory / EVALUATION):
            remove_unfinished(place)
        record = RunRecord.open(directory)
        lines = record.step_lines
        settle(directory, record.steps[-1].step if lines else -1, lines[-1] if lines else b"")
        writer.update_manifest(status="running", error="", steps=0, steps_digest="", **changes)
        remove(directory / SEAL)
        writer._take_up(record, replace_from)
        return writer

    def _take_up(self, record: RunRecord, replace_from: int | None) -> None:
        lines = record.step_lines
        if (self.directory / STEPS).exists():
            cut_file(self.directory / STEPS, sum(map(len, lines)))
        written = tuple(zip(record.steps, lines, strict=True))
        self._count_lines(written)
        if replace_from is None:
            self._recorded = {entry.step: entry for entry in record.steps}
        elif replace_from < len(written):
            self._replaced, self._next_step = written, replace_from

    def _count_lines(self, written: Sequence[tuple[StepEntry, bytes]]) -> None:
        self._lines, self._count, self._size, self._digests = blake3(), 0, 0, {}
        for entry, line in written:
            self._count_line(entry, line)

    def _count_line(self, entry: StepEntry, line: bytes) -> None:
        self._lines.update(line)
        self._count += 1
        self._size += len(line)
        self._next_step = entry.step + 1
        self._digests[self._next_step] = self._lines.hexdigest()
        self.last_weights_root = entry.weights_root

    def update_manifest(self, **changes: Any) -> None:
        """Replace fields of the manifest. Raises RecordError when it cannot be written; the old one then stands."""
        self._lock.require_place()
        changed = self._changed(changes)
        data = _manifest_bytes(changed)
        write_whole(self.directory / MANIFEST, data)
        self.manifest = changed
        if changed.status == "running":
            reserve(self.directory / RESERVE, 2 * len(data))

    def _changed(self, changes: Mapping[str, Any]) -> Manifest:
        table = {**self.manifest.model_dump(), **changes}
        return Manifest.model_validate({**table, "config_digest": settings_digest(table["config"])})

    def write_step(
        self,
        entry: StepEntry,
        samples: Sequence[Sample],
        train_log_probs: Sequence[Float32Array],
        advantages: Float32Array,
        evaluation: Sequence[Sample] = (),
        reference: Sequence[Float32Array] | None = None,
        taps: Mapping[str, bytes] = MappingProxyType({}),
    ) -> None:
        """Write a step: its samples' file, that of its evaluation and its taps, then its line.

        Args:
            entry: the step's line; its digests must be those of the samples, its steps must count up by one.
            samples: in (prompt index, sample index) order.
            train_log_probs: fp32 [R] a sample, of the training forward.
            advantages: fp32 [N], one a sample.
            evaluation: responses of the evaluation before the step, in order; none when none was due.
            reference: fp32 [R] a sample, of the reference model where there is one.
            taps: files of the step's taps by name.

        Raises:
            RecordError: something doesn't fit together, or the disk is full or refuses; earlier steps stay valid.
            ContractViolation: the step is recorded, from before the run was stopped, and now came out otherwise.
        """
        self._require_running()
        if entry.step in self._recorded:
            require_same_step(self._recorded.pop(entry.step), entry)
            return
        self._require_next(entry)
        updates = samples_of_updates(entry, len(samples))
        keys = [sample.key for sample in samples]
        columns = sample_columns(samples) | train_columns(keys, advantages, updates, train_log_probs, reference)
        evaluated = sample_columns(evaluation) if evaluation else None
        findings = [*entry_findings(entry, columns), *evaluation_findings(entry, evaluated)]
        if findings:
            raise _misuse(f"step {entry.step}: {findings[0]}", "Digest exactly what is handed over for recording.")
        self._lock.require_place()
        line = entry.model_dump_json().encode() + b"\n"
        files = {samples_path(self.directory, entry.step): to_parquet(columns)}
        if evaluated:
            make_folder(self.directory / EVALUATION)
            files[evaluation_path(self.directory, entry.step)] = to_parquet(evaluated, SAMPLE_FIELDS)
        with uninterrupted():
            self._append(entry, line, files, taps)

    def _append(self, entry: StepEntry, line: bytes, files: Mapping[Path, bytes], taps: Mapping[str, bytes]) -> None:
        if replaced := self._replaced:
            kept = replaced[: entry.step]
            replace_steps(self.directory, [text for _, text in kept], line, entry.step, files, taps)
            self._replaced = ()
            self._count_lines(kept)
        else:
            for path, data in files.items():
                write_whole(path, data)
            if taps:
                write_taps(taps_folder(self.directory, entry.step), taps)
            append_whole(self.directory / STEPS, line, self._size)
        self._count_line(entry, line)
        if replaced:
            settle(self.directory, entry.step, line)

    def finish(self, status: Status, error: str = "") -> None:
        """Seal the record and close it as ``complete``, ``failed`` or ``interrupted``; nothing can be written after."""
        self._require_running()
        self._lock.require_place()
        end = {"status": status, "error": error, "steps": self._count, "steps_digest": self._lines.hexdigest()}
        with uninterrupted():
            remove(self.directory / RESERVE)
            write_seal(self.directory, _manifest_bytes(self._changed(end)))
            self.update_manifest(**end)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self.manifest.status == "running":
                self._fail(error)
            elif self.manifest.status == "complete" and error is not None:
                error.add_note(f"the record {str(self.directory)!r} is complete: {self._count} steps")
        finally:
            self._lock.release()

    def _fail(self, error: BaseException | None) -> None:
        if error is None:
            self.finish("failed", "the run ended without saying how")
        else:
            self.finish_for(error)

    @contextmanager
    def closing_for_errors(self) -> Generator[None]:
        """What the block raises closes the record at once, and not only when the writer is left."""
        try:
            yield
        except BaseException as error:
            self.finish_for(error)
            raise

    def finish_for(self, error: BaseException) -> None:
        """Close the record because of an error, which is told what was kept and where. Does nothing when closed."""
        if self.manifest.status != "running":
            return
        status: Status = "interrupted" if isinstance(error, Interrupted | KeyboardInterrupt) else "failed"
        kept = f"{self._count} steps are kept in {str(self.directory)!r}"
        try:
            self.finish(status, f"{type(error).__name__}: {error}")
            note = f"{kept}, with status {status!r}"
            if status == "interrupted":
                note += f"; go on with: {resume_command(self.directory)}"
        except VimeError as second:
            note = f"{kept}, and the record's status could not be written: {second.message}"
            if not self._lock.in_place():
                note = f"the record, of {self._count} steps, is no longer at {str(self.directory)!r}"
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)

    def _require_running(self) -> None:
        if self.manifest.status != "running":
            raise _misuse(
                f"the record {str(self.directory)!r} is closed as {self.manifest.status}", "Start a new record."
            )

    def _require_next(self, entry: StepEntry) -> None:
        if self._next_step is not None and entry.step != self._next_step:
            raise _misuse(
                f"step {entry.step} comes where step {self._next_step} belongs", "Record every step, in order."
            )


def _require_unchanged(found: RunRecord) -> None:
    now = RunRecord.open(found.directory)
    if (now.manifest, now.step_lines) != (found.manifest, found.step_lines):
        raise RecordError(
            f"the record {str(found.directory)!r} was resumed by another process while this one prepared to",
            remedy="Look at how that ended; then resume again.",
            code="VIME-RECORD-060",
        )


def _manifest_bytes(manifest: Manifest) -> bytes:
    return manifest.model_dump_json(indent=2).encode() + b"\n"


def require_same_step(recorded: StepEntry, again: StepEntry) -> None:
    """Compare a step that was done again after a resume with its line; timings may differ.

    Raises:
        ContractViolation: naming the first result that differs.
    """
    for name in StepEntry.model_fields:
        if name != "timings" and getattr(recorded, name) != getattr(again, name):
            raise ContractViolation(
                f"step {again.step} was recorded before the run was stopped, and doing it again gave other {name}",
                remedy="Something that decides bits is not as it was; `vime verify resume CONFIG` shows whether a"
                " resumed run repeats at all on this machine. The record keeps what it held.",
                code="VIME-ALIGN-006",
            )


def samples_of_updates(entry: StepEntry, samples: int) -> list[int]:
    """Number of the optimizer step that trained on each sample: updates take samples in order, each sample once."""
    counts = [samples] if len(entry.updates) == 1 else [update.samples for update in entry.updates]
    if sum(counts) != samples:
        raise _misuse(
            f"step {entry.step}: its updates trained on {counts} samples, but {samples} were given",
            "Say in UpdateEntry.samples how many samples each update took, in sample order.",
        )
    return [number for number, count in enumerate(counts) for _ in range(count)]


def _misuse(message: str, remedy: str) -> RecordError:
    return RecordError(message, remedy=remedy, code="VIME-RECORD-004")
