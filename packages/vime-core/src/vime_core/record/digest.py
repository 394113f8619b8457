"""Digests of tensors, and the tree that joins them: the same value for the same bytes, wherever they were computed.

The 128-bit hash of a tensor's bytes is defined in `vime_core.record.hash128`. On top of it, with ``frame(parts)``
standing for every part preceded by its length as 8 little-endian bytes:

- *leaf* of a tensor: ``blake3(frame("vime-tensor/1", name, dtype, shape, hash))``; the shape is one 8-byte
  little-endian integer a dimension; the bytes are the elements in row-major order, little-endian.
- *root* over (name, leaf) in their order: leaf nodes ``blake3(frame("vime-merkle/1", "leaf", name, leaf))``; then
  neighbours pair up, ``blake3(frame("vime-merkle/1", "node", left, right))``, a last one without a neighbour moves up
  as it is, until one is left. The root over nothing is ``blake3(frame("vime-merkle/1", "empty"))``.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from vime_core.errors import RecordError
from vime_core.record.hash128 import Bytes, reference_hash
from vime_core.record.hash128_native import native

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from vime_core.record.hash128_cuda import HashQueue

_Started = dict[str, tuple[tuple[str, tuple[int, ...]], Callable[[], bytes]]]
"""By name: dtype and shape, and what waits for the hash."""
_TENSOR: Final = b"vime-tensor/1"
_MERKLE: Final = b"vime-merkle/1"
_NUMPY_KINDS: Final = "biufc"
_SMALL: Final = 1 << 16  # bytes that are hashed in less time than a thread takes to be asked


def implementation(device: torch.device | None = None) -> str:
    """``"c"``, on CUDA devices ``"triton"``; else the slower one in use and the reason why the fast one is not."""
    if device is not None and device.type == "cuda":
        reason = _cuda_fault(device)
        return f"{implementation()}, copied to the host ({reason})" if reason else "triton"
    fast = native()
    return "c" if fast.hash else f"numpy ({fast.reason})"


def bytes_hash(buffer: Any) -> bytes:
    """The 128-bit hash (16 bytes) of any contiguous buffer's raw bytes."""
    return _hash(np.frombuffer(buffer, dtype=np.uint8))


def tensor_digest(name: str, tensor: Tensor) -> str:
    """The leaf of a tensor, 64 hex digits. Strides don't matter; nor do device and autograd.

    Raises:
        RecordError: the tensor has no bytes of its own (meta, sparse or quantised).
    """
    return digest_tensors([(name, tensor)])[name]


def array_digest(name: str, array: NDArray[Any]) -> str:
    """The leaf of a numpy array: `tensor_digest` of a tensor with the same bytes, dtype and shape.

    Raises:
        RecordError: the dtype holds no numbers, or numbers that torch has no name for.
    """
    dtype = _numpy_name(name, array.dtype)
    flat = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"), copy=False)).reshape(-1)
    return _leaf(name, dtype, array.shape, _hash(flat.view(np.uint8)))


@runtime_checkable
class Digested(Protocol):
    """(name, tensor) pairs of another process, which digests them itself."""

    def digests(self) -> dict[str, str]:
        """What `digest_tensors` says of them."""
        ...


def digest_tensors(named: Iterable[tuple[str, Tensor]] | Digested) -> dict[str, str]:
    """The leaves of (name, tensor) pairs in their order. A tensor must keep its values until the last is handed over.

    On CUDA devices all are hashed before the host waits, on the streams that are current at the call; no more than
    about 2 GiB of tensors that nobody else holds is kept.

    Raises:
        RecordError: a name comes twice; a tensor has no bytes of its own (meta, sparse or quantised); or one on a
            device was written to before the last was handed over.
    """
    if isinstance(named, Digested):
        return named.digests()
    return digest_groups(named)[0]


def digest_groups(*groups: Iterable[tuple[str, Tensor]]) -> list[dict[str, str]]:
    """`digest_tensors` of each group of (name, tensor) pairs, with one wait for all. Groups may share names.

    Raises:
        RecordError: see `digest_tensors`.
    """
    queues: dict[torch.device, HashQueue | None] = {}
    started = [_start_group(named, queues) for named in groups]
    return [{name: _leaf(name, *head, hashed()) for name, (head, hashed) in group.items()} for group in started]


def _start_group(named: Iterable[tuple[str, Tensor]], queues: dict[torch.device, HashQueue | None]) -> _Started:
    started: _Started = {}
    for name, tensor in named:
        if name in started:
            raise RecordError(
                f"two tensors are called {name!r}", remedy="Give every tensor its own name.", code="VIME-RECORD-008"
            )
        started[name] = (_torch_name(name, tensor), tuple(tensor.shape)), _start_hash(tensor, queues)
    return started


def merkle_root(leaves: Mapping[str, str]) -> str:
    """The root over (name, leaf) pairs in the mapping's order, 64 hex digits.

    Raises:
        RecordError: a leaf is not 64 hex digits.
    """
    return _root(tuple(leaves.items()))


@lru_cache(maxsize=16)
def _root(leaves: tuple[tuple[str, str], ...]) -> str:
    """Remembered, because a step's roots are asked for where they are made and again where they are checked."""
    level = [_leaf_node(name, _leaf_bytes(name, leaf)) for name, leaf in leaves]
    while len(level) > 1:
        pairs = [
            blake3(b"".join((_NODE, left, _SIZE, right))).digest()
            for left, right in zip(level[::2], level[1::2], strict=False)
        ]
        level = pairs + level[len(level) - len(level) % 2 :]
    return (level[0] if level else blake3(_frame(_MERKLE, b"empty")).digest()).hex()


def _start_hash(tensor: Tensor, queues: dict[torch.device, HashQueue | None]) -> Callable[[], bytes]:
    """Start hashing, on the tensor's device or in a thread of the host; wait when the value is asked for."""
    if tensor.is_cuda and tensor.device not in queues:
        queues[tensor.device] = _cuda_queue(tensor.device)
    queue = queues.get(tensor.device)
    if queue is not None:
        return queue.add(tensor)
    if tensor.nbytes < _SMALL:
        hashed = _host_hash(tensor)
        return lambda: hashed
    return _threads().submit(_host_hash, tensor).result


@cache
def _threads() -> ThreadPoolExecutor:
    """One thread a core: the C hash runs without the interpreter's lock, near the speed of memory."""
    return ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="vime-digest")


def _host_hash(tensor: Tensor) -> bytes:
    import torch

    if tensor.numel() == 0:
        return bytes_hash(b"")
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return _hash(plain.reshape(-1).view(torch.uint8).numpy())


def _cuda_queue(device: torch.device) -> HashQueue | None:
    if reason := _cuda_fault(device):
        warnings.warn(f"tensors on {device} are digested on the host, slowly: {reason}", RuntimeWarning, stacklevel=4)
        return None
    from vime_core.record.hash128_cuda import HashQueue

    return HashQueue(device)


def _cuda_fault(device: torch.device) -> str:
    """Why the host digests this device's tensors, or ""."""
    import torch

    if torch.version.cuda is None:
        return "PyTorch was not built for CUDA"
    try:
        from vime_core.record import hash128_cuda
    except ImportError as error:
        return f"Triton cannot be imported: {error}"
    return hash128_cuda.fault(device)


def _hash(data: Bytes) -> bytes:
    return (native().hash or reference_hash)(data)


def _leaf(name: str, dtype: str, shape: tuple[int, ...], digest: bytes) -> str:
    return blake3(_leaf_head(name, dtype, shape) + _frame(digest)).hexdigest()


@lru_cache(maxsize=1 << 14)
def _leaf_head(name: str, dtype: str, shape: tuple[int, ...]) -> bytes:
    """Remembered, because both sides of an update take leaves of the same tensors in every step."""
    sizes = b"".join(size.to_bytes(8, "little") for size in shape)
    return _frame(_TENSOR, name.encode(), dtype.encode(), sizes)


def _leaf_node(name: str, leaf: bytes) -> bytes:
    encoded = name.encode()
    return blake3(b"".join((_LEAF, len(encoded).to_bytes(8, "little"), encoded, _SIZE, leaf))).digest()


def _frame(*parts: bytes) -> bytes:
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


# What the frames of a tree have in common, made once: there are thousands in a step.
_SIZE: Final = (32).to_bytes(8, "little")
_LEAF: Final = _frame(_MERKLE, b"leaf")
_NODE: Final = _frame(_MERKLE, b"node") + _SIZE


def _leaf_bytes(name: str, leaf: str) -> bytes:
    try:
        value = bytes.fromhex(leaf)
    except ValueError:
        value = b""
    if len(value) != 32 or value.hex() != leaf:
        raise RecordError(
            f"digest of {name!r} is {leaf!r}, not 64 hex digits",
            remedy="Take the record from its source again; this one was damaged or edited.",
            code="VIME-RECORD-006",
        )
    return value


def _torch_name(name: str, tensor: Tensor) -> str:
    import torch

    if tensor.is_meta or tensor.layout != torch.strided or tensor.is_quantized:
        raise RecordError(
            f"tensor {name!r} is {tensor.dtype} on {tensor.device} in layout {tensor.layout}: it has no plain bytes",
            remedy="Digest dense tensors that hold values; for a quantised one, its integers and its scales.",
            code="VIME-RECORD-008",
        )
    return _dtype_name(tensor.dtype)


@cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _numpy_name(name: str, dtype: np.dtype[Any]) -> str:
    if dtype.kind not in _NUMPY_KINDS or dtype.char in "gG":  # g and G are the processor's own long double
        raise RecordError(
            f"array {name!r} has dtype {dtype}, which has no defined digest",
            remedy="Convert it to integers, booleans or floats of 8 to 64 bits.",
            code="VIME-RECORD-008",
        )
    return dtype.name
