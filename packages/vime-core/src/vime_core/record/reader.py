"""Reads a run record. Whatever is truncated, damaged, foreign or too new is refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self, cast

from blake3 import blake3

from vime_core.errors import RecordError
from vime_core.record.check import RecordCheck, check_record
from vime_core.record.layout import MANIFEST, METRICS, STEPS, evaluation_path, samples_path, taps_folder
from vime_core.record.parquet import from_parquet
from vime_core.record.replacing import stored_path
from vime_core.record.samples import REFERENCE, SAMPLE_FIELDS, Column, require_order, sample_keys, samples_from
from vime_core.record.schema import FORMAT, Manifest, StepEntry
from vime_core.record.seal import read_seal
from vime_core.record.strict_json import damaged, loads, parse, read_file, validated
from vime_core.types import Float32Array, Sample


@dataclass(frozen=True)
class StepSamples:
    """A step's samples with what training made of them, all in sample order.

    ``advantages`` is fp32 [N]; ``updates`` numbers the optimizer step of each sample; ``train_log_probs`` is fp32 [R]
    a sample, and so is ``reference_log_probs``, empty where there is no reference model.
    """

    samples: list[Sample]
    advantages: Float32Array
    updates: tuple[int, ...]
    train_log_probs: tuple[Float32Array, ...]
    reference_log_probs: tuple[Float32Array, ...] = ()


@dataclass(frozen=True)
class RunRecord:
    """A record as it lies on disk, up to the last step that was written whole."""

    directory: Path
    manifest: Manifest

    @classmethod
    def open(cls, directory: Path) -> Self:
        """Read the manifest.

        Raises:
            RecordError: the directory is no record, is damaged, or was written in another format.
        """
        path = directory / MANIFEST
        if what := _no_record(directory):
            raise RecordError(
                f"{str(directory)!r} is not a run record: {what}",
                remedy="Name the directory that `vime run` wrote (run.output).",
                code="VIME-RECORD-005",
            )
        raw = loads(path, read_file(path))
        _require_format(path, raw)
        return cls(directory, validated(Manifest, path, raw))

    @cached_property
    def steps(self) -> tuple[StepEntry, ...]:
        """The steps that are whole. A last line without its newline was never finished and does not count.

        Raises:
            RecordError: a finished line is damaged, or the last one is unfinished in a complete record.
        """
        path = self.directory / STEPS
        *lines, torn = self._step_bytes.split(b"\n")
        if torn and self.manifest.status == "complete":
            raise damaged(path, f"its last line, {len(lines) + 1}, is cut off although the record is complete")
        return tuple(parse(StepEntry, path, line, number) for number, line in enumerate(lines, 1))

    @property
    def step_lines(self) -> tuple[bytes, ...]:
        """The lines of ``steps.jsonl`` with their newlines, unfinished line excluded."""
        return tuple(line + b"\n" for line in self._step_bytes.split(b"\n")[:-1])

    @cached_property
    def _line_of(self) -> Mapping[int, bytes]:
        return {entry.step: line for entry, line in zip(self.steps, self.step_lines, strict=False)}

    @property
    def steps_digest(self) -> str:
        """blake3 of ``steps.jsonl``, unfinished line excluded."""
        return blake3(self._step_bytes[: self._step_bytes.rfind(b"\n") + 1]).hexdigest()

    def columns(self, step: int) -> dict[str, Column]:
        """The columns of a step's samples. Raises RecordError when the file is missing or damaged."""
        return from_parquet(self._stored(samples_path, step))

    def step_samples(self, step: int) -> StepSamples:
        """A step's samples, advantages and train log-probs.

        Raises:
            RecordError: the file is missing or damaged, or a sample comes twice.
        """
        columns = self.columns(step)
        require_order(sample_keys(columns))
        return StepSamples(
            samples=samples_from(columns),
            advantages=columns["advantage"].values,
            updates=tuple(columns["update"].values.tolist()),
            train_log_probs=tuple(columns["train_log_probs"].rows()),
            reference_log_probs=tuple(columns[REFERENCE.name].rows()) if REFERENCE.name in columns else (),
        )

    def samples(self, step: int) -> list[Sample]:
        """A step's samples in (prompt index, sample index) order."""
        return self.step_samples(step).samples

    def evaluation_columns(self, step: int) -> dict[str, Column]:
        """The columns of the evaluation before a step. Raises RecordError when the file is missing or damaged."""
        return from_parquet(self._stored(evaluation_path, step), SAMPLE_FIELDS)

    def has_evaluation(self, step: int) -> bool:
        """Whether responses of an evaluation before a step are stored."""
        return self._stored(evaluation_path, step).exists()

    def taps_folder(self, step: int) -> Path:
        """Where the taps of a step lie, if there are any."""
        return self._stored(taps_folder, step)

    def _stored(self, path_of: Callable[[Path, int], Path], step: int) -> Path:
        path, line = path_of(self.directory, step), self._line_of.get(step)
        return path if line is None else stored_path(path, line)

    def evaluation_samples(self, step: int) -> list[Sample]:
        """The responses of the evaluation before a step, in (prompt index, sample index) order. Raises RecordError."""
        columns = self.evaluation_columns(step)
        require_order(sample_keys(columns))
        return samples_from(columns)

    @property
    def seal(self) -> str:
        """The digest of the seal; empty when there is none. Raises RecordError when it is damaged."""
        seal = read_seal(self.directory)
        return seal.digest if seal else ""

    def told_metrics(self) -> Iterator[Mapping[str, Any]]:
        """The lines of ``metrics.jsonl``. Raises RecordError where one is no JSON object or has a key twice."""
        path = self.directory / METRICS
        for number, line in enumerate(read_file(path).split(b"\n")[:-1] if path.is_file() else (), 1):
            table = loads(path, line, number, constants=True)
            if not isinstance(table, dict):
                raise damaged(path, f"line {number} is no JSON object")
            yield cast("Mapping[str, Any]", table)

    def check(self) -> RecordCheck:
        """Recompute every digest that can be recomputed from what is stored."""
        return check_record(self)

    @cached_property
    def _step_bytes(self) -> bytes:
        path = self.directory / STEPS
        return read_file(path) if path.exists() else b""


def _no_record(directory: Path) -> str:
    """Why there is no record, in words; empty where there may be one."""
    try:
        str(directory).encode()
        if (directory / MANIFEST).is_file():
            return ""
        return f"it has no {MANIFEST}" if directory.is_dir() else "it is no directory"
    except UnicodeEncodeError:
        return "its path is no UTF-8; rename it"
    except OSError as error:
        return error.strerror or str(error)


def _require_format(path: Path, raw: Any) -> None:
    found = cast("dict[str, Any]", raw).get("format") if isinstance(raw, dict) else None
    if found == FORMAT:
        return
    if isinstance(found, str) and re.fullmatch(r"vime-record/\d+", found):
        raise RecordError(
            f"{str(path)!r} is in format {found!r}, and this vime reads {FORMAT!r}",
            remedy="Read it with the version of vime that wrote it.",
            code="VIME-RECORD-007",
        )
    raise RecordError(
        f"{str(path.parent)!r} is not a run record: its {MANIFEST} has format {found!r}",
        remedy="Name the directory that `vime run` wrote (run.output).",
        code="VIME-RECORD-005",
    )
