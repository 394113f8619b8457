"""The sending half of a weight update: check names, dtypes and shapes, pack chunks, hand each to the engine."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from vime_core.backends import NamedTensors
from vime_core.errors import ContractViolation
from vime_vllm.memory import CudaBucket, new_shared_memory
from vime_vllm.wire import Chunk, CudaMemory, SharedMemory, dtype_name, lay_out, pack, padded, size_in_bytes

CHUNK_BYTES: Final = 256 * 2**20
"""Most bytes of a chunk on the host; a larger tensor is a chunk of its own."""
BUCKET_BYTES: Final = 1024 * 2**20
"""The same on a GPU, where the memory stays allocated from the first update to the last."""


@dataclass(frozen=True)
class TensorForm:
    """Dtype and shape of a tensor that the engine's kernels read."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes in a chunk."""
        return padded(size_in_bytes(self.dtype, self.shape))


def send_weights(
    weights: NamedTensors,
    version: int,
    expected: Mapping[str, TensorForm],
    deliver: Callable[[Chunk], None],
    bucket: CudaBucket,
) -> None:
    """Deliver every tensor in chunks; ``deliver`` returns when the engine has read the chunk.

    The last chunk goes only when every tensor that the engine holds was sent.

    Args:
        weights: (name, tensor) pairs of one trainer.
        version: that they become.
        expected: what the engine holds.
        deliver: hands a chunk to the engine.
        bucket: where chunks lie that come from a GPU.

    Raises:
        ContractViolation: a name, dtype or shape that the engine does not hold, a name twice, or one left out.
    """
    sent: set[str] = set()
    first = True
    for group, last in _groups(_checked(weights, expected, sent)):
        if last and (missing := [name for name in expected if name not in sent]):
            raise _refused(missing[0], f"is held by the engine but was not sent ({len(missing)} such tensors)")
        fields, nbytes = lay_out(group)
        with _shared(group, nbytes, bucket, expected) as (memory, flat):
            pack(group, fields, flat)
            _synchronize(flat)
            deliver(Chunk(version=version, first=first, last=last, tensors=list(fields), memory=memory))
        first = False


def _checked(weights: NamedTensors, expected: Mapping[str, TensorForm], sent: set[str]) -> NamedTensors:
    for name, tensor in weights:
        form = TensorForm(dtype_name(tensor.dtype), tuple(tensor.shape))
        if name in sent:
            raise _refused(name, "was sent twice")
        if name not in expected:
            raise _refused(name, "was sent, but the engine holds no such tensor")
        if form != expected[name]:
            raise _refused(name, f"was sent as {form}, but the engine holds {expected[name]}")
        sent.add(name)
        yield name, tensor


def _groups(weights: NamedTensors) -> Iterator[tuple[list[tuple[str, Tensor]], bool]]:
    """The tensors of each chunk, and whether it is the last one; that one is empty where there are no tensors."""
    group: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in weights:
        limit, room = BUCKET_BYTES if tensor.is_cuda else CHUNK_BYTES, padded(tensor.nbytes)
        if group and (size + room > limit or tensor.device != group[0][1].device):
            yield group, False
            group, size = [], 0
        group.append((name, tensor))
        size += room
    yield group, True


@contextmanager
def _shared(
    group: list[tuple[str, Tensor]], nbytes: int, bucket: CudaBucket, expected: Mapping[str, TensorForm]
) -> Generator[tuple[SharedMemory | CudaMemory, Tensor]]:
    device = group[0][1].device
    if device.type == "cuda":
        yield bucket.on(device, max(nbytes, _bucket_bytes(expected)))
        return
    with new_shared_memory(nbytes) as shared:
        yield shared


def _bucket_bytes(expected: Mapping[str, TensorForm]) -> int:
    """As much as the chunks of all updates need: the whole model where it is small, the largest tensor at least."""
    sizes = [form.nbytes for form in expected.values()]
    return min(sum(sizes), max(BUCKET_BYTES, *sizes))


def _synchronize(flat: Tensor) -> None:
    if flat.device.type == "cuda":
        torch.cuda.synchronize(flat.device)


def _refused(name: str, why: str) -> ContractViolation:
    return ContractViolation(
        f"weight {name!r} {why}",
        remedy="Make trainer and engine hold one structure: the same model directory, trainer.dtype and tying.",
        code="VIME-ALIGN-060",
    )
