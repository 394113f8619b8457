"""Sizes of blocks."""

from __future__ import annotations


def power_of_2(n: int) -> int:
    """The smallest power of two that is not below n >= 1."""
    return 1 << (n - 1).bit_length()


def parts(n: int, size: int) -> int:
    """How many parts of ``size`` hold n; `triton.cdiv` takes 2 us."""
    return -(-n // size)
