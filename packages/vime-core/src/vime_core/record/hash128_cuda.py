"""The hash of ``hash128.py`` on CUDA devices: many tensors in one launch of the kernel in ``hash128_triton.py``.

Tensors are read on the current stream of their device, as PyTorch's operations read them, in groups that bound how much
memory is held; nothing waits before the values are asked for. `vime_core.record.digest` imports this module when it
first sees a tensor on a CUDA device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from subprocess import CalledProcessError
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from triton import TritonError

from vime_core.errors import RecordError
from vime_core.record.hash128 import BLOCK_BYTES, BLOCK_WORDS, position_keys, reference_hash
from vime_core.record.hash128_triton import Shape, hash_jobs

ALIGNMENT: Final = 16
SHAPE: Final = Shape(job_blocks=16, rows=2, unroll=4)
GROUP_BYTES: Final = 2 << 30


def plan(lengths: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int32]:
    """The jobs of tensors with so many bytes, int32 [jobs, 2]: a tensor's number, and which of its jobs it is.

    Every tensor has a job, an empty one too.
    """
    blocks = np.asarray(lengths, dtype=np.int64) // BLOCK_BYTES
    counts = np.maximum(1, -(-blocks // SHAPE.job_blocks))
    before = np.cumsum(counts) - counts
    owner = np.repeat(np.arange(len(counts)), counts)
    return np.stack([owner, np.arange(len(owner)) - before[owner]], axis=1).astype(np.int32)


def launch(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Start hashing contiguous tensors that begin at multiples of 16 bytes; they may be freed, but not overwritten
    from another stream, before it is done.

    Returns:
        int64 [tensors, 4] on the device: address, length in bytes, A, B.
    """
    rows = np.zeros((len(tensors), 4), dtype=np.int64)
    rows[:, 0] = [tensor.data_ptr() for tensor in tensors]
    rows[:, 1] = [tensor.nbytes for tensor in tensors]
    jobs = plan(rows[:, 1])
    with torch.cuda.device_of(tensors[0]):
        sent = _sent(np.concatenate([rows.reshape(-1), jobs.view(np.int64).reshape(-1)]), device)
        table = sent[: rows.size].view(-1, 4)
        hash_jobs(table, sent[rows.size :].view(torch.int32).view(-1, 2), device_keys(device), SHAPE)
    return table


def _sent(numbers: NDArray[np.int64], device: torch.device) -> Tensor:
    """A copy on the device; pinned memory keeps the host from waiting for what the stream has yet to do."""
    host = torch.as_tensor(numbers)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


@cache
def device_keys(device: torch.device) -> Tensor:
    """uint32 [4, 2048]: low halves of a, high halves of a, then of b."""
    halves = position_keys().astype("<u8").view("<u4").reshape(BLOCK_WORDS, 4)
    return torch.as_tensor(np.ascontiguousarray(halves.T)).to(device)


class HashQueue:
    """Hashes tensors of one device on its current stream, which must stay the same from the first to the last."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._waiting: list[tuple[Tensor, int]] = []
        self._waiting_bytes = 0
        self._launched: list[Tensor] = []
        self._added = 0
        self._values: list[bytes] = []

    def add(self, tensor: Tensor) -> Callable[[], bytes]:
        """Queue the bytes of a strided tensor, row-major. The function returned waits for the hash, 16 bytes.

        A lazy conjugation or negation is done first, by the device: of a NaN it may make other bits than the host.

        Raises:
            RecordError: an earlier tensor was overwritten before its group was launched.
        """
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
        plain = plain.clone() if plain.data_ptr() % ALIGNMENT else plain
        self._waiting.append((plain, _version(plain)))
        self._waiting_bytes += plain.nbytes
        number = self._added
        self._added += 1
        if self._waiting_bytes >= GROUP_BYTES:
            self._launch()
        return lambda: self._all()[number]

    def _launch(self) -> None:
        waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
        for tensor, version in waiting:
            if _version(tensor) != version:
                raise RecordError(
                    f"a tensor {tuple(tensor.shape)} of {tensor.dtype} was overwritten while digests were taken",
                    remedy="Hand over tensors that keep their values until all are read, not one buffer filled anew.",
                    code="VIME-RECORD-008",
                )
        if waiting:
            self._launched.append(launch([tensor for tensor, _ in waiting], self._device))

    def _all(self) -> list[bytes]:
        if len(self._values) < self._added:
            self._launch()
            tables = torch.cat(self._launched) if len(self._launched) > 1 else self._launched[0]
            self._values = [row.tobytes() for row in tables.cpu().numpy()[:, 2:].astype("<i8")]
        return self._values


def _version(tensor: Tensor) -> int:
    """Counts in-place writes; inference tensors have no count."""
    return 0 if tensor.is_inference() else tensor._version  # pyright: ignore[reportPrivateUsage]


@cache
def fault(device: torch.device) -> str:
    """Why the kernel is not to be used on a device, or "". The first call compiles it and compares it with the
    reference: several jobs, an end within a word, a copied start, no bytes."""
    data = np.arange((SHAPE.job_blocks + 3) * BLOCK_BYTES + 4099, dtype=np.uint32).astype(np.uint8) * np.uint8(151)
    parts = (slice(None), slice(7), slice(1, None), slice(0))
    try:
        queue, whole = HashQueue(device), torch.as_tensor(data).to(device)
        found = [queue.add(whole[part]) for part in parts]
        agrees = all(hashed() == reference_hash(data[part]) for hashed, part in zip(found, parts, strict=True))
    except (RuntimeError, OSError, CalledProcessError, TritonError) as error:
        return f"{type(error).__name__}: {error}"
    return "" if agrees else "the compiled kernel disagrees with the reference"
