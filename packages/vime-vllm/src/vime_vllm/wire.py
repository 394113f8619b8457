"""What travels when weights do: names, dtypes, shapes, places, and where the bytes lie. Typed fields, no pickle."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import accumulate
from math import prod
from operator import mul
from typing import Annotated, Any, Final, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from vime_vllm.copying import copy_all

ALIGNMENT: Final = 64
"""Tensors begin at multiples of this many bytes."""

DTYPES: Final = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.uint8, torch.int32)
}
"""The dtypes that weights may have, by name."""

NonNegativeInt = Annotated[int, Field(ge=0)]


class _Fields(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class TensorField(_Fields):
    """One tensor within a chunk: contiguous, row-major, at ``offset`` bytes."""

    name: str
    dtype: str
    shape: list[NonNegativeInt]
    offset: NonNegativeInt

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return size_in_bytes(self.dtype, self.shape)


class SharedMemory(_Fields):
    """Bytes in a file of ``/dev/shm``."""

    kind: Literal["shared_memory"] = "shared_memory"
    name: str
    nbytes: NonNegativeInt


class CudaExport(_Fields):
    """One reader's handle: the fields that ``torch.multiprocessing`` shares a CUDA storage by.

    torch counts readers by export, so every tensor parallel rank has its own.
    """

    handle: bytes
    storage_bytes: NonNegativeInt
    storage_offset: NonNegativeInt
    ref_counter: bytes
    ref_counter_offset: NonNegativeInt
    event: bytes
    event_sync: bool


class CudaMemory(_Fields):
    """Bytes on a GPU of this machine; ``exports`` are by tensor parallel rank."""

    kind: Literal["cuda"] = "cuda"
    device_uuid: str
    nbytes: NonNegativeInt
    exports: list[CudaExport]


class Chunk(_Fields):
    """Some tensors of one weight update, in one piece of memory; ``first`` and ``last`` are its place in the update."""

    version: NonNegativeInt
    first: bool
    last: bool
    tensors: list[TensorField]
    memory: Annotated[SharedMemory | CudaMemory, Field(discriminator="kind")]

    @model_validator(mode="after")
    def _tensors_lie_inside(self) -> Chunk:
        for field in self.tensors:
            if field.dtype not in DTYPES:
                raise ValueError(f"{field.name!r} has dtype {field.dtype!r}, which weights cannot have")
            if field.offset + field.nbytes > self.memory.nbytes:
                raise ValueError(f"{field.name!r} ends after the chunk's {self.memory.nbytes} bytes")
        return self

    @property
    def used(self) -> int:
        """Bytes up to the end of the last tensor; the memory may be larger."""
        return max((field.offset + field.nbytes for field in self.tensors), default=0)

    def fields(self) -> dict[str, Any]:
        """Plain data for the engine's RPC."""
        return self.model_dump()


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` as ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def size_in_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of the elements."""
    return prod(shape) * DTYPES[dtype].itemsize


def padded(nbytes: int) -> int:
    """The room that a tensor takes in a chunk."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def lay_out(named: list[tuple[str, Tensor]]) -> tuple[tuple[TensorField, ...], int]:
    """Places for tensors in one piece of memory, in their order, and its size in bytes."""
    return _lay_out(tuple((name, dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in named))


@lru_cache(maxsize=16)
def _lay_out(forms: tuple[tuple[str, str, tuple[int, ...]], ...]) -> tuple[tuple[TensorField, ...], int]:
    """Remembered, because every update sends the same tensors."""
    fields: list[TensorField] = []
    end = 0
    for name, dtype, shape in forms:
        fields.append(TensorField(name=name, dtype=dtype, shape=list(shape), offset=end))
        end += padded(fields[-1].nbytes)
    return tuple(fields), end


def views(fields: Sequence[TensorField], flat: Tensor) -> list[Tensor]:
    """The tensors as views of a chunk's bytes (uint8 [N]), in one operation a tensor: a model has hundreds.

    Raises:
        ValueError: one does not lie within them.
    """
    typed: dict[str, Tensor] = {}
    found: list[Tensor] = []
    for field in fields:
        size = DTYPES[field.dtype].itemsize
        if field.offset % ALIGNMENT or field.offset + field.nbytes > flat.numel():
            raise ValueError(f"{field.name!r} does not lie within {flat.numel()} bytes at {field.offset}")
        if field.dtype not in typed:
            typed[field.dtype] = flat[: flat.numel() // size * size].view(DTYPES[field.dtype])
        whole, shape = typed[field.dtype], tuple(field.shape)
        found.append(whole.as_strided(shape, _strides(shape), whole.storage_offset() + field.offset // size))
    return found


@lru_cache(maxsize=1024)
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Those of a contiguous tensor."""
    return tuple(accumulate((max(1, size) for size in shape[:0:-1]), mul, initial=1))[::-1] if shape else ()


def pack(named: list[tuple[str, Tensor]], fields: Sequence[TensorField], flat: Tensor) -> None:
    """Copy each tensor to its place in ``flat`` (uint8 [nbytes])."""
    copy_all(views(fields, flat), [tensor for _, tensor in named])
