"""Reads a run record. Whatever is truncated, damaged, foreign or too new is refused by name."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self, TypeVar, cast

from blake3 import blake3
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from vime_core.errors import RecordError
from vime_core.record.check import RecordCheck, check_record
from vime_core.record.layout import MANIFEST, STEPS, samples_path
from vime_core.record.parquet import from_parquet
from vime_core.record.samples import Column, require_order, sample_keys, samples_from
from vime_core.record.schema import FORMAT, Manifest, StepEntry
from vime_core.types import Float32Array, Sample

_Model = TypeVar("_Model", bound=BaseModel)


@dataclass(frozen=True)
class StepSamples:
    """A step's samples with what training made of them, all in sample order.

    ``advantages`` is fp32 [N]; ``updates`` numbers the optimizer step of each sample; ``train_log_probs`` is fp32 [R]
    a sample.
    """

    samples: list[Sample]
    advantages: Float32Array
    updates: tuple[int, ...]
    train_log_probs: tuple[Float32Array, ...]


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
        if not path.is_file():
            what = f"it has no {MANIFEST}" if directory.is_dir() else "it is no directory"
            raise RecordError(
                f"{str(directory)!r} is not a run record: {what}",
                remedy="Name the directory that `vime run` wrote (run.output).",
                code="VIME-RECORD-005",
            )
        raw = _parsed(path, _read(path))
        _require_format(path, raw)
        return cls(directory, _validated(Manifest, path, raw))

    @cached_property
    def steps(self) -> tuple[StepEntry, ...]:
        """The steps that are whole. A last line without its newline was never finished and does not count.

        Raises:
            RecordError: a finished line is damaged, or the last one is unfinished in a complete record.
        """
        path = self.directory / STEPS
        *lines, torn = self._step_bytes.split(b"\n")
        if torn and self.manifest.status == "complete":
            raise _damaged(path, f"its last line, {len(lines) + 1}, is cut off although the record is complete")
        return tuple(
            _validated(StepEntry, path, _parsed(path, line, number), number) for number, line in enumerate(lines, 1)
        )

    @property
    def step_lines(self) -> tuple[bytes, ...]:
        """The lines of ``steps.jsonl`` with their newlines, unfinished line excluded."""
        return tuple(line + b"\n" for line in self._step_bytes.split(b"\n")[:-1])

    @property
    def steps_digest(self) -> str:
        """blake3 of ``steps.jsonl``, unfinished line excluded."""
        return blake3(self._step_bytes[: self._step_bytes.rfind(b"\n") + 1]).hexdigest()

    def columns(self, step: int) -> dict[str, Column]:
        """The columns of a step's samples. Raises RecordError when the file is missing or damaged."""
        return from_parquet(samples_path(self.directory, step))

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
        )

    def samples(self, step: int) -> list[Sample]:
        """A step's samples in (prompt index, sample index) order."""
        return self.step_samples(step).samples

    def check(self) -> RecordCheck:
        """Recompute every digest that can be recomputed from what is stored."""
        return check_record(self)

    @cached_property
    def _step_bytes(self) -> bytes:
        path = self.directory / STEPS
        return _read(path) if path.exists() else b""


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _damaged(path, error.strerror or str(error)) from error


def _parsed(path: Path, data: bytes, line: int = 0) -> Any:
    try:
        return from_json(data)
    except ValueError as error:
        raise _damaged(path, f"{f'line {line}: ' if line else ''}{error}") from error


def _validated(model: type[_Model], path: Path, raw: Any, line: int = 0) -> _Model:
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise _damaged(path, f"{f'line {line}: ' if line else ''}{where}: {first['msg']}") from error


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


def _damaged(path: Path, what: str) -> RecordError:
    return RecordError(
        f"{str(path)!r} is damaged: {what}",
        remedy="Take the record from its source again, or run again.",
        code="VIME-RECORD-006",
    )
