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

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from vime_core.errors import RecordError
from vime_core.record.hash128 import Bytes, reference_hash
from vime_core.record.hash128_native import native

if TYPE_CHECKING:
    from torch import Tensor

_TENSOR: Final = b"vime-tensor/1"
_MERKLE: Final = b"vime-merkle/1"
_NUMPY_KINDS: Final = "biufc"


def implementation() -> str:
    """``"c"``, or ``"numpy"`` with the reason why the fast one is not used."""
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
    return _leaf(name, _torch_name(name, tensor), tuple(tensor.shape), _hash_tensor(tensor))


def array_digest(name: str, array: NDArray[Any]) -> str:
    """The leaf of a numpy array: `tensor_digest` of a tensor with the same bytes, dtype and shape.

    Raises:
        RecordError: the dtype holds no numbers, or numbers that torch has no name for.
    """
    dtype = _numpy_name(name, array.dtype)
    flat = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"), copy=False)).reshape(-1)
    return _leaf(name, dtype, array.shape, _hash(flat.view(np.uint8)))


def digest_tensors(named: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """The leaves of (name, tensor) pairs in their order. Raises RecordError for a name that comes twice."""
    leaves: dict[str, str] = {}
    for name, tensor in named:
        if name in leaves:
            raise RecordError(
                f"two tensors are called {name!r}", remedy="Give every tensor its own name.", code="VIME-RECORD-008"
            )
        leaves[name] = tensor_digest(name, tensor)
    return leaves


def merkle_root(leaves: Mapping[str, str]) -> str:
    """The root over (name, leaf) pairs in the mapping's order, 64 hex digits.

    Raises:
        RecordError: a leaf is not 64 hex digits.
    """
    level = [_node(b"leaf", name.encode(), _leaf_bytes(name, leaf)) for name, leaf in leaves.items()]
    while len(level) > 1:
        pairs = [_node(b"node", level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
        level = pairs + level[len(level) - len(level) % 2 :]
    return (level[0] if level else _node(b"empty")).hex()


def _hash_tensor(tensor: Tensor) -> bytes:
    """The seam for devices: whoever adds a kernel for one answers here with the hash that `hash128` defines."""
    import torch

    if tensor.numel() == 0:
        return bytes_hash(b"")
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return _hash(plain.reshape(-1).view(torch.uint8).numpy())


def _hash(data: Bytes) -> bytes:
    return (native().hash or reference_hash)(data)


def _leaf(name: str, dtype: str, shape: tuple[int, ...], digest: bytes) -> str:
    sizes = b"".join(size.to_bytes(8, "little") for size in shape)
    return blake3(_frame(_TENSOR, name.encode(), dtype.encode(), sizes, digest)).hexdigest()


def _node(kind: bytes, *parts: bytes) -> bytes:
    return blake3(_frame(_MERKLE, kind, *parts)).digest()


def _frame(*parts: bytes) -> bytes:
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


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
    return str(tensor.dtype).removeprefix("torch.")


def _numpy_name(name: str, dtype: np.dtype[Any]) -> str:
    if dtype.kind not in _NUMPY_KINDS or dtype.char in "gG":  # g and G are the processor's own long double
        raise RecordError(
            f"array {name!r} has dtype {dtype}, which has no defined digest",
            remedy="Convert it to integers, booleans or floats of 8 to 64 bits.",
            code="VIME-RECORD-008",
        )
    return dtype.name
