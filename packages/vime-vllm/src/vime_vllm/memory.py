"""Memory that two processes see: a file of ``/dev/shm`` on the CPU, a CUDA IPC handle on a GPU."""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Final
from uuid import uuid4

import torch
from torch import Tensor

from vime_core.errors import BackendError
from vime_vllm.wire import CudaExport, CudaMemory, SharedMemory

_reductions = import_module("torch.multiprocessing.reductions")  # by name, because its types say nothing
_cuda = import_module("torch.cuda")
_DIRECTORY: Final = Path("/dev/shm")
_NAME: Final = re.compile(r"vime-\d+-[0-9a-f]{32}")


@contextmanager
def new_shared_memory(nbytes: int) -> Generator[tuple[SharedMemory, Tensor]]:
    """A new piece of shared memory and its bytes (uint8 [nbytes]); it is unlinked on leaving, whatever happens.

    Raises:
        BackendError: ``/dev/shm`` cannot hold it. The room is reserved first: writing to a file that has none
            would kill this process.
    """
    path = _DIRECTORY / f"vime-{os.getpid()}-{uuid4().hex}"
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        _reserve(descriptor, nbytes)
        bytes_ = mmap.mmap(descriptor, nbytes)
        yield SharedMemory(name=path.name, nbytes=nbytes), torch.frombuffer(bytes_, dtype=torch.uint8)
    finally:
        os.close(descriptor)
        path.unlink(missing_ok=True)


def open_shared_memory(memory: SharedMemory) -> Tensor:
    """The bytes of another process's shared memory, uint8 [nbytes]. Writing to them stays in this process."""
    if not _NAME.fullmatch(memory.name):
        raise ValueError(f"{memory.name!r} is not a name that vime gives to shared memory")
    descriptor = os.open(_DIRECTORY / memory.name, os.O_RDONLY)
    try:
        if os.fstat(descriptor).st_size != memory.nbytes:
            raise ValueError(f"shared memory {memory.name!r} does not have {memory.nbytes} bytes")
        bytes_ = mmap.mmap(descriptor, memory.nbytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(descriptor)
    return torch.frombuffer(bytes_, dtype=torch.uint8)


def shared_memory_in_use() -> list[str]:
    """Names of this process's shared memory that still exist."""
    return sorted(path.name for path in _DIRECTORY.glob(f"vime-{os.getpid()}-*"))


class CudaBucket:
    """Memory of a GPU that other processes map once and that every update fills again.

    Args:
        readers: how many processes map it.
    """

    def __init__(self, readers: int) -> None:
        self._readers = readers
        self._held: tuple[CudaMemory, Tensor] | None = None

    def on(self, device: torch.device, nbytes: int) -> tuple[CudaMemory, Tensor]:
        """At least so many bytes, uint8 [N], and what readers need to map them; the same as before where they do.

        A reader may still map what was given before; it must not read it any more.
        """
        if self._held is None or self._held[1].device != device or self._held[1].numel() < nbytes:
            self.release()
            flat = torch.empty(nbytes, dtype=torch.uint8, device=device)
            self._held = _share_cuda(flat, self._readers), flat
        return self._held

    def release(self) -> None:
        """Give the memory back. Idempotent."""
        held, self._held = self._held, None
        if held is not None and held[1].is_cuda:
            _cuda.ipc_collect()


class CudaMapping:
    """One reader's view of a `CudaBucket`, mapped anew only where it is another memory than before.

    Args:
        rank: which of the readers this is.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._opened: tuple[CudaExport, Tensor] | None = None

    def bytes_of(self, memory: CudaMemory) -> Tensor:
        """The bucket's bytes, uint8 [nbytes], on the device that they are on. ValueError: see `open_cuda`."""
        export = memory.exports[self._rank]
        if self._opened is None or self._opened[0] != export:
            self._opened = None
            self._opened = export, open_cuda(memory, self._rank)
        return self._opened[1]


def _share_cuda(flat: Tensor, readers: int) -> CudaMemory:
    return CudaMemory(
        device_uuid=device_uuid(flat.get_device()),
        nbytes=flat.numel(),
        exports=[_export(flat) for _ in range(readers)],
    )


def open_cuda(memory: CudaMemory, rank: int) -> Tensor:
    """The bytes of another process's GPU memory, uint8 [nbytes], on the device that they are on.

    Raises:
        ValueError: that GPU is not visible to this process.
    """
    export = memory.exports[rank]
    return _reductions.rebuild_cuda_tensor(
        Tensor,
        (memory.nbytes,),
        (1,),
        0,
        torch.UntypedStorage,
        torch.uint8,
        _device_index(memory.device_uuid),
        export.handle,
        export.storage_bytes,
        export.storage_offset,
        False,
        export.ref_counter,
        export.ref_counter_offset,
        export.event,
        export.event_sync,
    )


def device_uuid(index: int) -> str:
    """The identity of a GPU, the same in every process whatever CUDA_VISIBLE_DEVICES says."""
    return str(_cuda.get_device_properties(index).uuid)


def _device_index(uuid: str) -> int:
    visible = [device_uuid(index) for index in range(_cuda.device_count())]
    if uuid not in visible:
        raise ValueError(f"the trainer's GPU {uuid} is not visible to the engine, which sees {visible}")
    return visible.index(uuid)


def _export(flat: Tensor) -> CudaExport:
    fields = _reductions.reduce_tensor(flat)[1]
    return CudaExport(
        handle=fields[7],
        storage_bytes=fields[8],
        storage_offset=fields[9],
        ref_counter=fields[11],
        ref_counter_offset=fields[12],
        event=fields[13],
        event_sync=fields[14],
    )


def _reserve(descriptor: int, nbytes: int) -> None:
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        raise BackendError(
            f"/dev/shm has no room for {nbytes / 2**20:.0f} MiB of weights: {error}",
            remedy="Give /dev/shm more room (a container: --shm-size=1g).",
            code="VIME-BACKEND-064",
        ) from error
