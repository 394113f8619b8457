"""HF model directories to Megatron's torch_dist checkpoints and back, each proved by digest after it was written.

Layout, as Megatron's own tools read it::

    latest_checkpointed_iteration.txt   "release"
    release/                            the model's tensors (megatron.core.dist_checkpointing)
    vime.json                           digest of each tensor by HF name, their root, the dtype; of each file in hf/
    hf/                                 config.json and tokenizer, for the way back
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch
from blake3 import blake3
from megatron.core import dist_checkpointing
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from vime_core.backends import Ranks
from vime_core.config.schema import PluginsSection
from vime_core.errors import ConfigError, RecordError
from vime_core.record.digest import digest_tensors, merkle_root
from vime_megatron.checkpoint import reason_of, without_helper_process
from vime_megatron.conversion.flags import require_agreement, require_dtype
from vime_megatron.conversion.layout import chosen_layout
from vime_megatron.cpu_bridge import cuda_bridge
from vime_megatron.mapping import to_hf
from vime_megatron.model import PolicyModel, build_model
from vime_megatron.model_directory import ModelDirectory, read_model_directory
from vime_megatron.parallel import process_groups
from vime_megatron.quiet import silence_megatron
from vime_megatron.structures.registry import find_structure
from vime_megatron.structures.types import Blueprint

FORMAT: Final = "vime-torch-dist/2"
RELEASE: Final = "release"
NOTE: Final = "vime.json"
HF: Final = "hf"
WEIGHTS: Final = (".safetensors", ".safetensors.index.json", ".bin", ".gguf")
NAMES: Final[Mapping[torch.dtype, Literal["bf16", "fp32"]]] = {torch.bfloat16: "bf16", torch.float32: "fp32"}


class Note(BaseModel):
    """``vime.json``: ``root`` is over ``digests``, the tensors'; ``files`` holds the digests of those in ``hf/``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: str
    dtype: Literal["bf16", "fp32"]
    digests: Mapping[str, str]
    root: str
    files: Mapping[str, str] = {}  # an older format without it is named as such


@dataclass(frozen=True)
class Converted:
    """What was written, how many tensors, and the Merkle root of their digests by HF name."""

    path: Path
    tensors: int
    root: str

    def __str__(self) -> str:
        return f"{self.path}: {self.tensors} tensors, root {self.root}; read back and equal"


def to_torch_dist(
    source: Path, output: Path, flags: Mapping[str, str | None] | None = None, ranks: Ranks | None = None
) -> Converted | None:
    """Write a HF model directory as a torch_dist checkpoint, read it back, and compare every tensor's digest.

    Several ranks, as torchrun starts them, write a part each; the first one reads all of it back. Each holds the model.

    Args:
        source: HF directory in bf16 or fp32.
        output: the directory to make; it must not exist.
        flags: Megatron's model flags, ``--num-layers`` to ``24``, which must agree with the source's ``config.json``,
            and the sizes of its tensor and pipeline parallelism.
        ranks: this process's place; None: as torchrun's variables say.

    Returns:
        What was written; None on all ranks but the first.

    Raises:
        ConfigError: ``output`` exists, the source is unusable, a flag contradicts it or the ranks or is not known,
            or what was written differs.
    """
    ranks, flags = ranks or started_ranks(os.environ), flags or {}
    _refuse_existing(output)
    directory = read_model_directory(source)
    require_agreement(flags, directory, _blueprint(directory))
    weights = {name: t for name, t in directory.load().items() if not name.endswith("rotary_emb.inv_freq")}
    dtype = _dtype(weights, source)
    require_dtype(flags, dtype)
    with _built(directory, dtype, ranks=ranks) as (model, blueprint):
        wanted = _digests(model, blueprint)
        layers = blueprint.transformer["num_layers"]
        share = chosen_layout(ranks, flags, layers).share(_sharded(model)["model"], ranks.rank, layers)
        _save(share, output, ranks)
    if ranks.rank:
        return None
    _copy_rest(source, output / HF)
    files = _file_digests(output / HF)
    note = Note(format=FORMAT, dtype=dtype, digests=wanted, root=merkle_root(wanted), files=files)
    (output / NOTE).write_text(note.model_dump_json(indent=2) + "\n")
    (output / "latest_checkpointed_iteration.txt").write_text(RELEASE)
    with _built(directory, dtype, empty=True) as (model, blueprint):
        _load(model, output)
        _require_equal(wanted, _digests(model, blueprint), output)
    held = {name: digest for name, digest in digest_tensors(iter(weights.items())).items() if name in wanted}
    _require_equal({name: wanted[name] for name in held}, held, source)
    return Converted(output, len(wanted), note.root)


def started_ranks(environment: Mapping[str, str]) -> Ranks:
    """The place of this process among those that torchrun started; a single one without it.

    Raises:
        ConfigError: a variable that torchrun sets is absent, or no number that fits.
    """
    world_size = _started_number(environment, "WORLD_SIZE", "1", range(1, 2**31))
    if world_size == 1:
        return Ranks()
    rank, local_rank = (_started_number(environment, name, "", range(world_size)) for name in ("RANK", "LOCAL_RANK"))
    return Ranks(rank, world_size, local_rank, "env://")


def _started_number(environment: Mapping[str, str], name: str, default: str, allowed: range) -> int:
    text = environment.get(name, default)
    if not re.fullmatch("[0-9]{1,10}", text) or int(text) not in allowed:
        raise ConfigError(
            f"the environment has {name}={text!r}, which is no number from {allowed[0]} to {allowed[-1]}",
            remedy=f"Start several ranks with torchrun, which sets it, or unset {name} and WORLD_SIZE for one.",
            code="VIME-CONFIG-078",
        )
    return int(text)


def _save(share: dict[str, Any], output: Path, ranks: Ranks) -> None:
    """Write this rank's share; no rank looks at ``output`` before all have seen that it is not there."""
    torch.distributed.barrier()
    if ranks.rank == 0:
        (output / RELEASE).mkdir(parents=True)
    torch.distributed.barrier()
    with cuda_bridge(), without_helper_process():
        dist_checkpointing.save({"model": share}, str(output / RELEASE))
    torch.distributed.barrier()


def to_hf_directory(source: Path, output: Path) -> Converted:
    """Write a checkpoint that `to_torch_dist` made as a HF directory, read it back, and compare every digest.

    Raises:
        ConfigError: ``output`` exists, or the checkpoint is no such one or damaged.
    """
    _refuse_existing(output)
    note = _read_note(source)
    _require_files(note, source, source / HF)
    directory = ModelDirectory(source / HF, json.loads((source / HF / "config.json").read_text()), {})
    with _built(directory, note.dtype, empty=True) as (model, blueprint):
        _load(model, source)
        weights = {name: tensor.clone() for name, tensor in _named(model, blueprint)}
        _require_equal(note.digests, digest_tensors(iter(weights.items())), source)
    shutil.copytree(source / HF, output)
    _require_files(note, output, output)
    save_file(weights, output / "model.safetensors", metadata={"format": "pt"})
    written = read_model_directory(output).load()
    _require_equal(note.digests, digest_tensors((name, written[name]) for name in weights), output)
    return Converted(output, len(weights), note.root)


@contextmanager
def _built(
    directory: ModelDirectory, dtype: str, *, empty: bool = False, ranks: Ranks | None = None
) -> Generator[tuple[PolicyModel, Blueprint]]:
    silence_megatron()
    blueprint = _blueprint(directory)
    with process_groups(ranks or Ranks(), 1):
        yield build_model(directory, blueprint, dtype=dtype, context=blueprint.context, load=not empty), blueprint


def _blueprint(directory: ModelDirectory) -> Blueprint:
    return find_structure(directory.model_type, PluginsSection()).blueprint(directory.config)


def _sharded(model: PolicyModel) -> dict[str, Any]:
    module: Any = model
    return {"model": module.sharded_state_dict()}


def _load(model: PolicyModel, source: Path) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    try:
        with cuda_bridge():
            loaded: Any = dist_checkpointing.load(_sharded(model), str(source / RELEASE))
    except (Exception, CheckpointException) as error:  # whatever comes of a damaged file; torch's is no Exception
        raise _damaged(source, f"its tensors cannot be read: {reason_of(error)}") from error
    model.load_state_dict(loaded["model"], strict=True)


def _named(model: PolicyModel, blueprint: Blueprint) -> Any:
    return to_hf({name: parameter.detach() for name, parameter in model.named_parameters()}, blueprint.rules)


def _digests(model: PolicyModel, blueprint: Blueprint) -> dict[str, str]:
    return dict(digest_tensors(_named(model, blueprint)))


def _dtype(weights: Mapping[str, Tensor], source: Path) -> Literal["bf16", "fp32"]:
    dtypes = {tensor.dtype for tensor in weights.values()}
    if len(dtypes) != 1 or next(iter(dtypes)) not in NAMES:
        raise ConfigError(
            f"the weights in {str(source)!r} are of {sorted(map(str, dtypes))}, not all bfloat16 or all float32",
            remedy="Convert them to one of the two first.",
            code="VIME-CONFIG-059",
        )
    return NAMES[next(iter(dtypes))]


def _copy_rest(source: Path, target: Path) -> None:
    target.mkdir()
    for file in source.iterdir():
        if file.is_file() and not file.name.endswith(WEIGHTS):
            shutil.copy2(file, target / file.name)


def _read_note(source: Path) -> Note:
    try:
        note = Note.model_validate_json((source / NOTE).read_bytes())
        root = merkle_root(note.digests)
    except ValidationError as error:
        first = error.errors()[0]
        said = ": ".join([*map(str, first["loc"]), first["msg"]])
        raise _damaged(source, f"it has no readable {NOTE}: {said}") from error
    except (OSError, RecordError) as error:
        raise _damaged(source, f"it has no readable {NOTE}: {error}") from error
    if note.format != FORMAT:
        raise _damaged(source, f"{NOTE} has format {note.format!r}, not {FORMAT!r}")
    if note.root != root:
        raise _damaged(source, f"{NOTE} has root {note.root!r}, and its digests have {root!r}")
    return note


def _file_digests(directory: Path) -> dict[str, str]:
    """BLAKE3 of every file below a directory, by its path there."""
    files = sorted(file for file in directory.rglob("*") if file.is_file())
    return {file.relative_to(directory).as_posix(): blake3(file.read_bytes()).hexdigest() for file in files}


def _require_files(note: Note, checkpoint: Path, directory: Path) -> None:
    """Raise ConfigError unless a directory holds the files of ``hf/`` as they were written, and nothing else."""
    try:
        found = _file_digests(directory)
    except OSError as error:
        raise _damaged(checkpoint, f"{HF}/ cannot be read: {error}") from error
    for name in sorted({"config.json", *note.files, *found}):
        if name not in found:
            raise _damaged(checkpoint, f"{HF}/{name} is missing")
        if name not in note.files:
            raise _damaged(checkpoint, f"{HF}/{name} stands there, and {NOTE} does not list it")
        if found[name] != note.files[name]:
            raise _damaged(checkpoint, f"{HF}/{name} differs from its digest in {NOTE}")


def _require_equal(wanted: Mapping[str, str], found: Mapping[str, str], where: Path) -> None:
    unequal = [name for name in {**wanted, **found} if wanted.get(name) != found.get(name)]
    if unequal or not wanted:
        raise _damaged(where, f"{len(unequal)} of {len(wanted)} tensors differ, first {unequal[:1]}")


def _damaged(path: Path, what: str) -> ConfigError:
    return ConfigError(
        f"{str(path)!r} is no sound checkpoint: {what}",
        remedy="Check the disk, remove the directory and convert again.",
        code="VIME-CONFIG-064",
    )


def _refuse_existing(output: Path) -> None:
    if output.exists():
        raise ConfigError(
            f"output {str(output)!r} exists",
            remedy="Name a directory that does not exist yet.",
            code="VIME-CONFIG-047",
        )
