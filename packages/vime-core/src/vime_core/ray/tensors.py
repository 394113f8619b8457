"""Named tensors on their way between actors: raw bytes in chunks, fetched only by who needs the values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from vime_core.backends import NamedTensors

if TYPE_CHECKING:
    from torch import Tensor

CHUNK_BYTES: Final = 256 * 2**20
"""Most bytes of a chunk; a larger tensor is a chunk of its own."""


@dataclass(frozen=True)
class Packed:
    """One tensor: its row-major bytes, uint8."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]


def pack(name: str, tensor: Tensor) -> Packed:
    """A copy of a tensor of any device as bytes."""
    import torch

    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
    return Packed(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), flat.copy())


def unpack(packed: Packed) -> tuple[str, Tensor]:
    """The tensor, on the CPU, in memory of its own."""
    import torch

    tensor = torch.empty(packed.shape, dtype=getattr(torch, packed.dtype))
    if packed.data.size:
        tensor.view(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(packed.data.tobytes()), dtype=torch.uint8))
    return packed.name, tensor


def chunks(named: NamedTensors) -> Iterator[list[Packed]]:
    """Packed tensors in their order, some at a time."""
    group: list[Packed] = []
    for name, tensor in named:
        if group and sum(one.data.nbytes for one in group) + tensor.nbytes > CHUNK_BYTES:
            yield group
            group = []
        group.append(pack(name, tensor))
    if group:
        yield group


class RemoteTensors:
    """(name, tensor) pairs of other processes: `digests` computes there, `references` hands on, iterating fetches.

    Args:
        digests: of the tensors as they are now.
        references: Ray's references of their chunks, made one by one.
        get: the value of a reference.
    """

    def __init__(
        self, digests: Callable[[], dict[str, str]], references: Callable[[], Iterator[Any]], get: Callable[[Any], Any]
    ) -> None:
        self._digests = digests
        self._references = references
        self._get = get
        self._pairs: Iterator[tuple[str, Tensor]] | None = None

    def digests(self) -> dict[str, str]:
        """See `vime_core.record.digest.Digested`."""
        return self._digests()

    def references(self) -> Iterator[Any]:
        """References of chunks (`Packed` lists), in order."""
        return self._references()

    def __iter__(self) -> RemoteTensors:
        return self

    def __next__(self) -> tuple[str, Tensor]:
        if self._pairs is None:
            self._pairs = (unpack(one) for reference in self._references() for one in self._get(reference))
        return next(self._pairs)


def unpacked(parts: Sequence[Any], get: Callable[[Any], Any]) -> NamedTensors:
    """The pairs of chunks, each fetched when its turn comes."""
    return (unpack(one) for part in parts for one in get(part))
