"""Checkpoints: Megatron's torch_dist for tensors, and a marker that is written last and vouches for every file.

Layout of a checkpoint directory::

    torch_dist/     weights, masters, moments, scheduler (megatron.core.dist_checkpointing)
    trainer.json    what model it is of, RNG states, and size and digest of every file above
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import json
import os
import queue
import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch.distributed as dist
from blake3 import blake3
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from vime_core.config.schema import TrainerSection
from vime_core.errors import RecordError
from vime_megatron.cpu_bridge import cuda_bridge
from vime_megatron.optimization import Optimization
from vime_megatron.rng import RngState, read_rng, restore_rng

FORMAT: Final = "vime-megatron-checkpoint/1"
MARKER: Final = "trainer.json"
TENSORS: Final = "torch_dist"
WRITE_ERRORS: Final = (OSError, RuntimeError, CheckpointException)
"""What a full disk ends in, by the place where it is noticed; torch's own is no subclass of Exception."""
METADATA: Final = {"distrib_optim_sharding_type": "dp_reshardable"}


class FileEntry(BaseModel):
    """One file of a checkpoint."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    size: int
    digest: str


class Identity(BaseModel):
    """What must agree between a checkpoint and the trainer that loads it.

    Args:
        model_type: the structure.
        parameters: digest of the names and shapes of all parameters.
        dtype: of the weights.
        optimizer: the settings that a checkpoint's optimizer state was made with.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model_type: str
    parameters: str
    dtype: str
    optimizer: Mapping[str, float | tuple[float, ...]]


class Marker(BaseModel):
    """``trainer.json``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: str
    identity: Identity
    rng: RngState
    files: Mapping[str, FileEntry]


def identity(model_type: str, parameters: Mapping[str, Tensor], config: TrainerSection) -> Identity:
    """The identity of a trainer."""
    shapes = json.dumps({name: list(tensor.shape) for name, tensor in parameters.items()})
    return Identity(
        model_type=model_type,
        parameters=blake3(shapes.encode()).hexdigest(length=16),
        dtype=config.dtype,
        optimizer=config.model_dump(include={"lr", "betas", "eps", "weight_decay", "clip_grad", "warmup_steps"}),
    )


def save_checkpoint(directory: Path, optimization: Optimization, who: Identity) -> None:
    """Write a checkpoint below an empty or absent directory.

    Raises:
        RecordError: the directory holds something, or cannot be written.
    """
    first = dist.get_rank() == 0
    try:
        if first:
            _make_empty(directory)
        dist.barrier()
        with cuda_bridge(), without_helper_process():
            dist_checkpointing.save(_state(optimization, loading=False), str(directory / TENSORS))
        dist.barrier()
        if first:
            _write_marker(directory, who)
        dist.barrier()
    except WRITE_ERRORS as error:
        free = shutil.disk_usage(directory).free >> 20 if directory.is_dir() else 0
        raise _unusable(
            directory,
            f"cannot be written: {reason_of(error)}; {free} MiB are free there",
            remedy="Free space, or write to another disk.",
            code="VIME-RECORD-041",
        ) from error


def _make_empty(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise _unusable(
            directory,
            "is not empty",
            remedy="Save to a directory that is empty or does not exist.",
            code="VIME-RECORD-040",
        )
    (directory / TENSORS).mkdir()


def load_checkpoint(directory: Path, optimization: Optimization, who: Identity) -> None:
    """Restore what `save_checkpoint` wrote. Nothing is changed unless every file is as it was written.

    Raises:
        RecordError: the checkpoint is absent, incomplete, damaged, or of another model or dtype.
    """
    marker = _read_marker(directory)
    _check_identity(directory, marker, who)
    _check_files(directory, marker)
    with cuda_bridge():
        loaded: Any = dist_checkpointing.load(_state(optimization, loading=True), str(directory / TENSORS))
    optimization.model.module.load_state_dict(loaded["model"], strict=True)
    optimization.load_state_dict(loaded["optimizer"], loaded["scheduler"])
    restore_rng(marker.rng)


@contextmanager
def without_helper_process() -> Generator[None]:
    """For saves: Megatron spawns a process, which imports the main module again, for a queue of asynchronous saves."""
    plain: queue.Queue[Any] = queue.Queue()
    with patch.object(filesystem_async, "get_write_results_queue", lambda: plain):
        yield


def _state(optimization: Optimization, *, loading: bool) -> dict[str, Any]:
    module: Any = optimization.model.module
    model = module.sharded_state_dict(metadata=_layer_metadata(module))
    optimizer = optimization.optimizer.sharded_state_dict(model, is_loading=loading, metadata=dict(METADATA))
    return {"model": model, "optimizer": optimizer, "scheduler": optimization.scheduler.state_dict()}


def _layer_metadata(module: Any) -> dict[str, bool]:
    """Megatron stacks layers into one tensor a parameter, unless it is told that they differ."""
    forms = {tuple((name, p.shape) for name, p in layer.named_parameters()) for layer in module.decoder.layers}
    return {"non_homogeneous_layers": True} if len(forms) > 1 else {}


def _write_marker(directory: Path, who: Identity) -> None:
    files = {name: _entry(directory / name) for name in _file_names(directory)}
    marker = Marker(format=FORMAT, identity=who, rng=read_rng(), files=files)
    unfinished = directory / f"{MARKER}.tmp"
    with unfinished.open("w", encoding="utf-8") as stream:
        stream.write(marker.model_dump_json())
        stream.flush()
        os.fsync(stream.fileno())
    unfinished.rename(directory / MARKER)


def _read_marker(directory: Path) -> Marker:
    file = directory / MARKER
    if not file.is_file():
        raise _unusable(
            directory, f"is no complete checkpoint: it has no {MARKER}", remedy=_EARLIER, code="VIME-RECORD-042"
        )
    try:
        marker = Marker.model_validate_json(file.read_bytes())
    except (ValidationError, OSError) as error:
        raise _unusable(
            directory, f"has a damaged {MARKER}: {error}", remedy=_EARLIER, code="VIME-RECORD-043"
        ) from error
    if marker.format != FORMAT:
        raise _unusable(
            directory,
            f"has format {marker.format!r}, not {FORMAT!r}",
            remedy="Use the version that wrote it.",
            code="VIME-RECORD-044",
        )
    return marker


def _check_identity(directory: Path, marker: Marker, who: Identity) -> None:
    for field in Identity.model_fields:
        found, wanted = getattr(marker.identity, field), getattr(who, field)
        if found != wanted:
            raise _unusable(
                directory,
                f"is of another run: its {field} is {found!r}, this trainer's is {wanted!r}",
                remedy="Load it with the model and the trainer settings that it was written with.",
                code="VIME-RECORD-045",
            )


def _check_files(directory: Path, marker: Marker) -> None:
    if set(_file_names(directory)) != set(marker.files):
        differing = sorted(set(_file_names(directory)) ^ set(marker.files))
        raise _unusable(
            directory,
            f"does not hold the files it was written with: {differing}",
            remedy=_EARLIER,
            code="VIME-RECORD-046",
        )
    for name, entry in marker.files.items():
        if _entry(directory / name) != entry:
            raise _unusable(
                directory, f"is damaged: {name} is not what was written", remedy=_EARLIER, code="VIME-RECORD-047"
            )


def _file_names(directory: Path) -> list[str]:
    files = (file for file in (directory / TENSORS).rglob("*") if file.is_file())
    return sorted(file.relative_to(directory).as_posix() for file in files)


def _entry(file: Path) -> FileEntry:
    return FileEntry(size=file.stat().st_size, digest=blake3().update_mmap(file).hexdigest())


def reason_of(error: BaseException) -> str:
    """The last line of what an error says: torch's checkpoint errors put tracebacks before it."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


_EARLIER = "Load an earlier checkpoint of the run."


def _unusable(directory: Path, what: str, *, remedy: str, code: str) -> RecordError:
    return RecordError(f"checkpoint {str(directory)!r} {what}", remedy=remedy, code=code)
