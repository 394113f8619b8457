"""The seal of a closed record: a digest of every file, and one over all of them.

It finds every later edit of a sealed file by somebody who does not seal again. It is no signature: who knows the digest
of the seal from elsewhere (``vime run`` prints it) finds every edit, and nobody else can tell a record that was edited
and sealed again from one that was not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from blake3 import blake3

from vime_core.record.digest import merkle_root
from vime_core.record.files import explained, write_whole
from vime_core.record.layout import FOLDERS, MANIFEST, SEAL, TOP_FILES
from vime_core.record.schema import FORMAT, Seal
from vime_core.record.strict_json import parse, read_file

if TYPE_CHECKING:
    from vime_core.record.reader import RunRecord


def sealed_files(directory: Path) -> Iterator[str]:
    """Names of the files that a seal covers, ascending: those of the record itself, unfinished ones excluded.

    Checkpoints may be removed, and an engine's log is there only while it runs or when it failed.
    """
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory)
        own = name.parts[0] in FOLDERS or name.as_posix() in TOP_FILES
        if own and path.is_file() and not any(part.startswith(".") for part in name.parts):
            yield name.as_posix()


def write_seal(directory: Path, manifest: bytes) -> str:
    """Seal a record that is about to be closed, and return the seal's digest.

    The seal comes before the manifest that it seals: who is killed between the two leaves a record that still runs.

    Args:
        directory: the record.
        manifest: as it will be.

    Raises:
        RecordError: it cannot be written.
    """
    with explained(directory):
        files = {name: _digest(directory / name) for name in sealed_files(directory)}
    files[MANIFEST] = blake3(manifest).hexdigest()
    seal = Seal(format=FORMAT, files=files, digest=merkle_root(files))
    write_whole(directory / SEAL, seal.model_dump_json(indent=2).encode() + b"\n")
    return seal.digest


def read_seal(directory: Path) -> Seal | None:
    """The seal, or None when there is none. Raises RecordError when it is damaged."""
    path = directory / SEAL
    return parse(Seal, path, read_file(path)) if path.is_file() else None


def seal_findings(record: RunRecord) -> Iterator[str]:
    """Where a record is not what was sealed."""
    if record.manifest.status == "running":
        return
    seal = read_seal(record.directory)
    if seal is None:
        yield f"{SEAL} is missing, although the record is {record.manifest.status}"
        return
    if seal.format != FORMAT:
        yield f"{SEAL}: its format is {seal.format!r}, not {FORMAT!r}"
    if merkle_root(seal.files) != seal.digest:
        yield f"{SEAL}: its digest is not that of the {len(seal.files)} files that it lists"
    yield from _file_findings(record.directory, seal.files)


def _file_findings(directory: Path, files: Mapping[str, str]) -> Iterator[str]:
    for name, digest in files.items():
        path = directory / name
        if ".." in path.parts[len(directory.parts) :] or not path.is_relative_to(directory):
            yield f"{SEAL} lists {name!r}, which is no file of a record"
            continue
        if not path.is_file():
            yield f"{name} is missing, although it was sealed"
            continue
        try:
            if _digest(path) != digest:
                yield f"{name} is not what was sealed"
        except OSError as error:
            yield f"{name} cannot be read: {error.strerror or error}"
    for name in sealed_files(directory):
        if name not in files:
            yield f"{name} was not there when the record was sealed"


def _digest(path: Path) -> str:
    hasher = blake3()
    if path.stat().st_size:  # an empty file cannot be mapped
        hasher.update_mmap(path)
    return hasher.hexdigest()
