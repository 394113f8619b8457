"""The 128-bit hash of raw bytes that every digest of a record rests on: one definition for CPU and GPU.

It detects errors; it is no defence against someone who wants two tensors to collide (its keys are public).

**Definition.** Integers are unsigned 64 bit and wrap. ``mix`` is splitmix64's finaliser and
``s(n) = mix(n * 0x9E3779B97F4A7C15)`` its stream.

- The bytes, zero-padded to whole words, are little-endian 32-bit words; 2048 words are a block (8 KiB).
- Word i of every block has the odd keys ``a[i] = s(2i + 1) | 1`` and ``b[i] = s(2i + 2) | 1``.
- Block j has the sums ``p[j] = sum of word * a[i]`` and ``q[j] = sum of word * b[i]`` over its words, and the tweaks
  ``t[j] = s(4097 + 2j)`` and ``u[j] = s(4098 + 2j)``.
- After the J blocks of data comes one more "block" J whose two sums are both the length in bytes.
- ``A = sum of mix(p[j] + t[j])`` and ``B = sum of mix(q[j] + u[j])``, j = 0..J.
- The hash is A, then B, each as 8 little-endian bytes.

All sums are exact in any order, so blocks and words may be scheduled freely, and a tensor that is split at block
boundaries is hashed piecewise and added up.

**Why a change is seen.** Let a word change by d != 0, |d| < 2**32.

- One word: ``d * a[i] != 0 mod 2**64`` because a[i] is odd, so the block sum changes; mix is a bijection, so exactly
  one term of A changes, and A with it. *Always detected*, by A alone and by B alone.
- Two words i, k of a block: both sums survive only if ``d * (a[i] b[k] - b[i] a[k]) = 0 mod 2**64``. The bracket is
  divisible by at most 2**32 for every pair (a test checks these very keys: the ratios a/b are distinct mod 2**33), so
  ``|d| >= 2**32``, which no word allows. *Always detected*; a swap of two words is such a change.
- More words of one block: let 2**t be the largest power of two that divides every difference, t <= 31. Over random
  odd keys a sum survives with probability at most 2**-(63-t), both with 2**-(126-2t): 2**-126 when any difference is
  odd, 2**-64 at worst (differences in the top bit of words only).
- Several blocks: two or more terms of A must cancel after mix, and the same terms of B: about 2**-128 where both sums
  of each block changed, 2**-64 at worst. Permuted blocks are of this kind, since every block has its own tweak.
- Length: with equally many blocks the last term alone differs: always detected. Otherwise as for several blocks.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]
Bytes = NDArray[np.uint8]

BLOCK_WORDS: Final = 2048
BLOCK_BYTES: Final = 4 * BLOCK_WORDS
GOLDEN: Final = 0x9E3779B97F4A7C15
_BLOCKS_AT_ONCE: Final = 64


def mix(z: Words) -> Words:
    """splitmix64's finaliser, a bijection of 64-bit words (Steele, Lea, Flood 2014, variant 13 of Stafford)."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def stream(first: int, count: int) -> Words:
    """``s(first) .. s(first + count - 1)``, uint64 [count]."""
    return mix((np.uint64(first) + np.arange(count, dtype=np.uint64)) * np.uint64(GOLDEN))


@cache
def position_keys() -> Words:
    """The keys a and b of each word of a block, uint64 [2048, 2]."""
    return stream(1, 2 * BLOCK_WORDS).reshape(BLOCK_WORDS, 2) | np.uint64(1)


def tweaks(first_block: int, count: int) -> Words:
    """The tweaks t and u of blocks ``first_block`` and on, uint64 [count, 2]."""
    return stream(2 * BLOCK_WORDS + 1 + 2 * first_block, 2 * count).reshape(count, 2)


def reference_hash(data: Bytes) -> bytes:
    """The hash of uint8 [N], computed as it is defined. Slow (well under 1 GB/s); works everywhere."""
    whole = len(data) // BLOCK_BYTES * BLOCK_BYTES
    total = np.zeros(2, dtype=np.uint64)
    step = _BLOCKS_AT_ONCE * BLOCK_BYTES
    for start in range(0, whole, step):
        total += _term(_block_sums(data[start : min(start + step, whole)]), start // BLOCK_BYTES)
    blocks = whole // BLOCK_BYTES
    if whole < len(data):
        total += _term(_block_sums(_padded(data[whole:])), blocks)
        blocks += 1
    total += _term(np.full((1, 2), len(data), dtype=np.uint64), blocks)
    return total.astype("<u8").tobytes()


def _block_sums(blocks: Bytes) -> Words:
    """p and q of whole blocks: uint8 [J * 8192] to uint64 [J, 2]."""
    words = np.ascontiguousarray(blocks).view("<u4").reshape(-1, BLOCK_WORDS).astype(np.uint64)
    keys = position_keys()
    return np.stack([(words * keys[:, side]).sum(axis=1, dtype=np.uint64) for side in (0, 1)], axis=1)


def _term(sums: Words, first_block: int) -> Words:
    """What blocks add to (A, B): uint64 [J, 2] to uint64 [2]."""
    return mix(sums + tweaks(first_block, len(sums))).sum(axis=0, dtype=np.uint64)


def _padded(tail: Bytes) -> Bytes:
    block = np.zeros(BLOCK_BYTES, dtype=np.uint8)
    block[: len(tail)] = tail
    return block
