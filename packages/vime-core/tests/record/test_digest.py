from __future__ import annotations

import subprocess
import sys

import blake3
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vime_core.errors import RecordError
from vime_core.record import digest
from vime_core.record.digest import (
    array_digest,
    bytes_hash,
    digest_groups,
    digest_tensors,
    merkle_root,
    tensor_digest,
)

SHARED_DTYPES = ["float16", "float32", "float64", "int8", "uint8", "int16", "int32", "int64", "bool", "complex64"]
TORCH_DTYPES = [
    *(getattr(torch, name) for name in SHARED_DTYPES),
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint16,
    torch.uint32,
    torch.uint64,
]


def random_tensor(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) > 0.5
    count = int(np.prod(shape)) * dtype.itemsize
    raw = np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).reshape(shape) if count else torch.zeros(shape, dtype=dtype)


def leaf(name: str, dtype: str, shape: tuple[int, ...], data: bytes) -> str:
    """The leaf as the document defines it."""
    parts = [b"vime-tensor/1", name.encode(), dtype.encode(), b"".join(n.to_bytes(8, "little") for n in shape)]
    framed = b"".join(len(p).to_bytes(8, "little") + p for p in [*parts, bytes_hash(data)])
    return blake3.blake3(framed).hexdigest()


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_leaf_binds_name_dtype_shape_and_bytes(dtype: torch.dtype) -> None:
    tensor = random_tensor(dtype, 3, 5)
    data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    name = str(dtype).removeprefix("torch.")
    assert tensor_digest("w", tensor) == leaf("w", name, (3, 5), data)
    others = {
        tensor_digest("w", tensor),
        tensor_digest("v", tensor),
        tensor_digest("w", tensor.reshape(5, 3)),
        tensor_digest("w", tensor.reshape(15)),
        tensor_digest("w", tensor.reshape(1, 15)),
        tensor_digest("w", tensor.contiguous().view(torch.uint8)),
    }
    assert len(others) == (5 if dtype == torch.uint8 else 6)


@pytest.mark.parametrize("name", SHARED_DTYPES)
def test_numpy_and_torch_agree(name: str) -> None:
    tensor = random_tensor(getattr(torch, name), 4, 7)
    assert array_digest("x", tensor.numpy()) == tensor_digest("x", tensor)


@given(st.lists(st.integers(0, 4), max_size=4), st.permutations(range(4)), st.sampled_from(TORCH_DTYPES))
@settings(max_examples=100, deadline=None)
def test_strides_do_not_matter(shape: list[int], order: list[int], dtype: torch.dtype) -> None:
    tensor = random_tensor(dtype, *shape)
    permuted = tensor.permute([axis for axis in order if axis < len(shape)])
    assert tensor_digest("x", permuted) == tensor_digest("x", permuted.contiguous().clone())


def test_views_at_odd_offsets_expanded_and_conjugated_tensors() -> None:
    base = random_tensor(torch.bfloat16, 20_001)
    assert tensor_digest("x", base[1:]) == tensor_digest("x", base[1:].clone())
    assert tensor_digest("x", base[::3]) == tensor_digest("x", base[::3].clone())
    row = random_tensor(torch.float32, 1, 4)
    assert tensor_digest("x", row.expand(3, 4)) == tensor_digest("x", row.repeat(3, 1))
    number = random_tensor(torch.complex64, 3)
    assert tensor_digest("x", number.conj()) == tensor_digest("x", number.conj().resolve_conj())
    assert tensor_digest("x", number.conj()) != tensor_digest("x", number)
    assert tensor_digest("x", number.conj().imag) == tensor_digest("x", number.conj().imag.clone())
    assert tensor_digest("x", torch._neg_view(row)) == tensor_digest("x", -row)  # as conjugation leaves imaginary parts


def test_scalars_empty_tensors_and_parameters() -> None:
    scalar = torch.tensor(1.5)
    assert tensor_digest("x", scalar) == array_digest("x", np.array(1.5, dtype=np.float32))
    assert tensor_digest("x", scalar) != tensor_digest("x", scalar.reshape(1))
    assert tensor_digest("x", torch.zeros(0, 3)) == array_digest("x", np.zeros((0, 3), dtype=np.float32))
    assert tensor_digest("x", torch.zeros(0, 3)) != tensor_digest("x", torch.zeros(3, 0))
    parameter = torch.nn.Parameter(torch.ones(3))
    assert tensor_digest("x", parameter) == tensor_digest("x", torch.ones(3))


def test_signed_zero_and_nan_payloads_differ() -> None:
    assert tensor_digest("x", torch.tensor([0.0])) != tensor_digest("x", torch.tensor([-0.0]))
    payloads = np.array([0x7FC00000, 0x7FC00001, 0xFFC00000], dtype=np.uint32).view(np.float32)
    assert len({array_digest("x", payloads[i : i + 1]) for i in range(3)}) == 3


def test_byte_order_of_numpy_does_not_matter() -> None:
    array = np.arange(10, dtype="<i4")
    assert array_digest("x", array.astype(">i4")) == array_digest("x", array)


@pytest.mark.parametrize(
    "array", [np.array(["a"]), np.array([None]), np.zeros(2, dtype="M8[s]"), np.zeros(2, "f4,f4"), np.zeros(2, "g")]
)
def test_arrays_without_a_digest_are_refused(array: np.ndarray) -> None:
    with pytest.raises(RecordError, match="has no defined digest") as caught:
        array_digest("x", array)
    assert caught.value.code == "VIME-RECORD-008"


@pytest.mark.parametrize("tensor", [torch.zeros(2, device="meta"), torch.eye(3).to_sparse()], ids=["meta", "sparse"])
def test_tensors_without_bytes_are_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(RecordError, match=r"'x' is torch\.float32 on .* no plain bytes"):
        tensor_digest("x", tensor)


def test_digest_tensors_keeps_order_and_refuses_a_name_that_comes_twice() -> None:
    named = [("b", torch.ones(2)), ("a", torch.zeros(2))]
    assert list(digest_tensors(named)) == ["b", "a"]
    assert digest_tensors(iter(named))["a"] == tensor_digest("a", torch.zeros(2))
    with pytest.raises(RecordError, match="two tensors are called 'a'"):
        digest_tensors([*named, ("a", torch.zeros(3))])


def reference_root(leaves: dict[str, str]) -> str:
    """RFC 6962's recursion (split at the largest power of two), with this format's nodes."""

    def node(*parts: bytes) -> bytes:
        return blake3.blake3(b"".join(len(p).to_bytes(8, "little") + p for p in (b"vime-merkle/1", *parts))).digest()

    def root(items: list[tuple[str, str]]) -> bytes:
        if len(items) == 1:
            return node(b"leaf", items[0][0].encode(), bytes.fromhex(items[0][1]))
        split = 1 << ((len(items) - 1).bit_length() - 1)
        return node(b"node", root(items[:split]), root(items[split:]))

    return (root(list(leaves.items())) if leaves else node(b"empty")).hex()


def some_leaves(count: int) -> dict[str, str]:
    return {f"t{i}": tensor_digest(f"t{i}", torch.tensor([i])) for i in range(count)}


def test_groups_are_digested_each_on_its_own() -> None:
    """Names may come in both, and tensors be of any size: small ones are hashed at once, others in threads."""
    first = [("w", torch.zeros(2)), ("large", random_tensor(torch.float32, 300, 200))]
    second = [("w", torch.ones(3)), ("first", torch.zeros(2))]
    assert digest_groups(iter(first), iter(second), []) == [digest_tensors(first), digest_tensors(second), {}]
    assert digest_groups(first)[0]["large"] == leaf("large", "float32", (300, 200), first[1][1].numpy().tobytes())
    with pytest.raises(RecordError, match="two tensors are called 'w'"):
        digest_groups(first, [*second, ("w", torch.ones(3))])


@pytest.mark.parametrize("count", range(18))
def test_merkle_root_is_the_tree(count: int) -> None:
    assert merkle_root(some_leaves(count)) == reference_root(some_leaves(count))


def test_merkle_root_sees_order_names_leaves_and_absence() -> None:
    leaves = some_leaves(5)
    roots = {
        merkle_root(leaves),
        merkle_root(dict(reversed(leaves.items()))),
        merkle_root({**leaves, "t0": leaves["t1"]}),
        merkle_root({("u0" if name == "t0" else name): leaf for name, leaf in leaves.items()}),
        merkle_root({name: leaf for name, leaf in leaves.items() if name != "t4"}),
        merkle_root({**leaves, "t5": leaves["t4"]}),
        merkle_root({}),
    }
    assert len(roots) == 7


@pytest.mark.parametrize("bad", ["", "00", "zz" * 32, "AB" * 32, "00 " * 32])
def test_merkle_root_refuses_what_is_no_digest(bad: str) -> None:
    with pytest.raises(RecordError, match="digest of 'w'"):
        merkle_root({"w": bad})


def test_bytes_hash_takes_any_buffer() -> None:
    data = bytes(range(100))
    assert bytes_hash(data) == bytes_hash(bytearray(data)) == bytes_hash(memoryview(data))
    assert bytes_hash(data) == bytes_hash(np.frombuffer(data, dtype=np.float32))
    assert len(bytes_hash(b"")) == 16


def test_implementation_says_which() -> None:
    assert digest.implementation() == "c"


def test_digests_import_no_torch() -> None:
    code = (
        "import sys, numpy as np; from vime_core.record import digest, reader, writer;"
        "digest.array_digest('x', np.zeros(3, dtype=np.float32));"
        "print('torch' in sys.modules, 'pyarrow' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
