"""Checkpoints of a run: written beside the record, complete or absent, and refused when anything in them is not as
it was written or belongs to another run."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

from blake3 import blake3
from pydantic import BaseModel, ConfigDict, ValidationError

from vime_core.backends import Trainer
from vime_core.errors import RecordError, VimeError
from vime_core.plugins.foreign import describe_foreign
from vime_core.record.files import explained, free_bytes, make_folder, sync_directory
from vime_core.record.layout import CHECKPOINTS, STATE
from vime_core.record.points import reached

FORMAT: Final = "vime-checkpoint/2"
TRAINER: Final = "trainer"


class LoopState(BaseModel):
    """What the loop itself must remember; data order and seeds are functions of these.

    Args:
        run_id: of the record that it belongs to.
        next_step: the first step that is not in it.
        weight_version: of the trainer's weights.
        run_seed: of the run.
        weights_root: Merkle root of the trainer's weights.
        optimizer_root: the same of its optimizer's state.
        steps_digest: blake3 of the lines of ``steps.jsonl`` before ``next_step``.
        settings: what the run began with, by dotted key, but for keys that a resume may change.
        loop: whatever else the loop carries from step to step, as JSON.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    run_id: str
    next_step: int
    weight_version: int
    run_seed: int
    weights_root: str
    optimizer_root: str
    steps_digest: str
    settings: Mapping[str, Any]
    loop: Mapping[str, Any] = {}


class _Stored(BaseModel):
    """``state.json``: written last, it vouches for itself and for every other file of the checkpoint."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: str
    state: LoopState
    files: Mapping[str, str]
    digest: str


def checkpoint_directory(record: Path, step: int) -> Path:
    """Where the checkpoint after ``step`` steps lies."""
    return record / CHECKPOINTS / f"step-{step:06d}"


def last_checkpoint(record: Path) -> Path | None:
    """The checkpoint of the most steps, or None. A half-written one has no such name."""
    found = (path for path in (record / CHECKPOINTS).glob("step-*") if re.fullmatch(r"step-[0-9]+", path.name))
    return max(found, key=lambda path: int(path.name.removeprefix("step-")), default=None)


def write_checkpoint(trainer: Trainer, record: Path, state: LoopState) -> Path:
    """Write trainer state and loop state, then give the directory its name: a half-written one never has it.

    Raises:
        RecordError: it cannot be written; nothing of it is left, and earlier checkpoints are as they were.
    """
    final = checkpoint_directory(record, state.next_step)
    partial = final.with_name(f".{final.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    with explained(final):
        make_folder(final.parent)
        try:
            _write_partial(trainer, partial, state)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)  # the record's last files may need the room
            raise
        partial.rename(final)
        reached("renamed", final)
        sync_directory(final.parent)
    return final


def _write_partial(trainer: Trainer, partial: Path, state: LoopState) -> None:
    (partial / TRAINER).mkdir(parents=True)
    reached("created", partial)
    _save(trainer, partial / TRAINER)
    reached("saved", partial / TRAINER)
    _write_state(partial, state)
    _sync_tree(partial)
    reached("synced", partial)


def _save(trainer: Trainer, directory: Path) -> None:
    try:
        trainer.save(directory)
    except (OSError, VimeError):
        raise
    except Exception as error:  # a library's own of a full disk, mostly
        raise RecordError(
            f"the trainer cannot save to {str(directory)!r}: {describe_foreign(error)};"
            f" {free_bytes(directory)} bytes are free there",
            remedy="Free space where that is missing; else report it to the authors of the trainer's plugin.",
            code="VIME-RECORD-061",
        ) from error


def read_checkpoint(directory: Path) -> LoopState:
    """The loop state of a checkpoint, every file of which is as it was written.

    Raises:
        RecordError: it is incomplete, damaged, or written in another format.
    """
    stored = _stored(directory)
    try:
        files = _digests(directory)
    except OSError as error:
        raise RecordError(
            f"checkpoint {str(directory)!r} cannot be read: {error}",
            remedy="Check that you may read every file of it.",
            code="VIME-RECORD-009",
        ) from error
    if changed := sorted(name for name in {*files, *stored.files} if files.get(name) != stored.files.get(name)):
        name = changed[0]
        how = "is missing" if name not in files else "is not of it" if name not in stored.files else "was changed"
        raise _unusable(directory, f"is damaged: {name} {how}", "VIME-RECORD-052")
    return stored.state


def _write_state(directory: Path, state: LoopState) -> None:
    files = _digests(directory)
    stored = _Stored(format=FORMAT, state=state, files=files, digest=_self_digest(state, files))
    text = stored.model_dump_json(indent=2).encode() + b"\n"
    for place, part in ((0, text[: len(text) // 2]), (1, text[len(text) // 2 :])):
        with (directory / STATE).open("ab" if place else "wb") as stream:
            stream.write(part)
        reached("written", directory / STATE)


def _stored(directory: Path) -> _Stored:
    try:
        data = (directory / STATE).read_bytes()
        found = json.loads(data)
        written = cast("dict[str, Any]", found).get("format") if isinstance(found, dict) else None
        if written != FORMAT:
            raise _unusable(directory, f"has format {written!r}, not {FORMAT!r}", "VIME-RECORD-053")
        stored = _Stored.model_validate_json(data)
    except (OSError, ValueError, ValidationError) as error:
        reason = str(error).splitlines()[0]
        raise _unusable(directory, f"is damaged: {STATE} cannot be read: {reason}", "VIME-RECORD-052") from error
    if stored.digest != _self_digest(stored.state, stored.files):
        raise _unusable(directory, f"is damaged: {STATE} was changed", "VIME-RECORD-052")
    return stored


def _self_digest(state: LoopState, files: Mapping[str, str]) -> str:
    text = json.dumps([FORMAT, state.model_dump(mode="json"), dict(files)], sort_keys=True)
    return blake3(text.encode()).hexdigest()


def _digests(directory: Path) -> dict[str, str]:
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path != directory / STATE)
    return {path.relative_to(directory).as_posix(): blake3().update_mmap(path).hexdigest() for path in files}


def _unusable(directory: Path, what: str, code: str) -> RecordError:
    return RecordError(
        f"checkpoint {str(directory)!r} {what}",
        remedy="Move this checkpoint out of the record: the run then goes on from the one before it.",
        code=code,
    )


def _sync_tree(directory: Path) -> None:
    for path in sorted(directory.rglob("*")):
        _sync(path)
    _sync(directory)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
