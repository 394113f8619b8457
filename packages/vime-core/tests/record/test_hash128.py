from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vime_core.record.hash128 import BLOCK_BYTES, BLOCK_WORDS, position_keys, reference_hash
from vime_core.record.hash128_native import native

MASK = 2**64 - 1
NATIVE = native()
BYTES = np.random.default_rng(5).integers(0, 256, 10 * BLOCK_BYTES, dtype=np.uint8)
EDGES = [
    k * BLOCK_BYTES + d
    for k in (0, 1, 2, 3, 4, 5, 8, 9)
    for d in (-5, -4, -3, -1, 0, 1, 2, 3, 4)
    if k * BLOCK_BYTES + d >= 0
]


def native_hash(data: np.ndarray) -> bytes:
    assert NATIVE.hash is not None, NATIVE.reason
    return NATIVE.hash(data)


def by_definition(data: bytes) -> bytes:
    """The definition with Python's integers, written without a look at the implementation."""

    def s(n: int) -> int:
        z = (n * 0x9E3779B97F4A7C15) & MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return z ^ (z >> 31)

    def mix(z: int) -> int:
        z &= MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return z ^ (z >> 31)

    total = [0, 0]
    blocks = [data[i : i + 8192] for i in range(0, len(data), 8192)]
    for j, block in enumerate(blocks):
        padded = block + b"\0" * (-len(block) % 4)
        words = [int.from_bytes(padded[i : i + 4], "little") for i in range(0, len(padded), 4)]
        for side in (0, 1):
            block_sum = sum(w * (s(2 * i + 1 + side) | 1) for i, w in enumerate(words))
            total[side] += mix(block_sum + s(4097 + 2 * j + side))
    for side in (0, 1):
        total[side] += mix(len(data) + s(4097 + 2 * len(blocks) + side))
    return b"".join((value & MASK).to_bytes(8, "little") for value in total)


@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 1000, 8191, 8192, 8193, 2 * 8192 + 7])
def test_reference_is_the_definition(length: int) -> None:
    assert reference_hash(BYTES[:length]) == by_definition(BYTES[:length].tobytes())


def test_values_are_frozen() -> None:
    """Records outlive versions: these values never change within a format."""
    assert reference_hash(np.zeros(0, dtype=np.uint8)).hex() == FROZEN[0]
    assert reference_hash(np.arange(256, dtype=np.uint8)).hex() == FROZEN[1]
    assert reference_hash((np.arange(100_000) % 251).astype(np.uint8)).hex() == FROZEN[2]


FROZEN = ("2acddbb0d3549aa37dc5be2ca26fe9d6", "236b2a765f09cab467b5941fc8be42a7", "b134121e421e2d2a04b0d79e47d3caee")


def test_there_is_a_compiled_hash_where_there_is_a_compiler() -> None:
    assert NATIVE.hash is not None, NATIVE.reason


@pytest.mark.parametrize("length", EDGES)
@pytest.mark.parametrize("offset", [0, 1, 2, 3])
def test_compiled_equals_reference_at_edges(length: int, offset: int) -> None:
    data = BYTES[offset : offset + length]
    assert native_hash(data) == reference_hash(data)


@given(st.binary(max_size=300), st.integers(0, 6 * BLOCK_BYTES), st.integers(0, 63))
@settings(max_examples=200, deadline=None)
def test_compiled_equals_reference(prefix: bytes, length: int, offset: int) -> None:
    data = np.concatenate([np.frombuffer(prefix, np.uint8), BYTES[offset : offset + length]])
    assert native_hash(data) == reference_hash(data)


def test_compiled_equals_reference_on_extreme_words() -> None:
    data = np.full(9 * BLOCK_BYTES + 1, 255, dtype=np.uint8)
    assert native_hash(data) == reference_hash(data)


@pytest.fixture(params=[reference_hash, native_hash], ids=["reference", "compiled"])
def hashed(request: pytest.FixtureRequest) -> Callable[[np.ndarray], bytes]:
    return request.param


@given(st.integers(0, 6 * BLOCK_BYTES * 8 - 1))
@settings(max_examples=300, deadline=None)
def test_a_flipped_bit_always_changes_both_halves(bit: int) -> None:
    data = BYTES[: 6 * BLOCK_BYTES].copy()
    before = native_hash(data)
    data[bit // 8] ^= 1 << (bit % 8)
    after = native_hash(data)
    assert before[:8] != after[:8]
    assert before[8:] != after[8:]


@given(st.integers(0, 4 * BLOCK_WORDS - 1), st.integers(0, 4 * BLOCK_WORDS - 1), st.integers(1, 2**32 - 1))
@settings(max_examples=300, deadline=None)
def test_swapped_words_and_paired_changes_are_seen(i: int, k: int, change: int) -> None:
    words = BYTES[: 4 * BLOCK_BYTES].view(np.uint32).copy()
    before = native_hash(words.view(np.uint8))
    swapped = words.copy()
    swapped[[i, k]] = swapped[[k, i]]
    assert (native_hash(swapped.view(np.uint8)) != before) == (words[i] != words[k])
    if i != k:
        moved = words.copy()
        moved[[i, k]] += np.array([change, -change], dtype=np.int64).astype(np.uint32)
        assert native_hash(moved.view(np.uint8)) != before


def test_keys_prove_that_two_changed_words_of_a_block_are_seen() -> None:
    """a[i] b[k] - b[i] a[k] is divisible by 2**33 exactly when the ratios a/b agree mod 2**33: for no pair."""
    keys = [[int(side) for side in pair] for pair in position_keys()]
    assert all(a % 2 and b % 2 for a, b in keys)
    ratios = [a * pow(b, -1, 2**33) % 2**33 for a, b in keys]
    assert len(set(ratios)) == BLOCK_WORDS
    assert len({key for pair in keys for key in pair}) == 2 * BLOCK_WORDS


def test_swapped_blocks_are_seen(hashed: Callable[[np.ndarray], bytes]) -> None:
    blocks = BYTES[: 6 * BLOCK_BYTES].reshape(6, BLOCK_BYTES)
    values = {hashed(np.ascontiguousarray(np.roll(blocks, shift, axis=0)).reshape(-1)) for shift in range(6)}
    assert len(values) == 6


def test_zeros_of_every_length_differ(hashed: Callable[[np.ndarray], bytes]) -> None:
    lengths = [*range(70), *EDGES]
    values = {hashed(np.zeros(length, dtype=np.uint8)) for length in lengths}
    assert len(values) == len(set(lengths))


def test_sign_flips_of_a_whole_block_are_seen(hashed: Callable[[np.ndarray], bytes]) -> None:
    """The weakest class: every difference is 2**31."""
    words = BYTES[:BLOCK_BYTES].view(np.uint32)
    rng = np.random.default_rng(0)
    values = {hashed(words.view(np.uint8))}
    for _ in range(200):
        mask = rng.integers(0, 2, BLOCK_WORDS, dtype=np.uint32) << np.uint32(31)
        values.add(hashed((words ^ mask).view(np.uint8)))
    assert len(values) == 201


def test_bits_of_the_hash_are_balanced() -> None:
    bits = np.array([np.unpackbits(np.frombuffer(native_hash(BYTES[i : i + 64]), np.uint8)) for i in range(4000)])
    assert np.abs(bits.mean(axis=0) - 0.5).max() < 0.05
