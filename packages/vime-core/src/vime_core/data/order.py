"""The order of prompts as a function of (seed, epoch): no generator, no state, any step on demand."""

from __future__ import annotations

from functools import lru_cache

from vime_core.rl.seeds import derive_key, keyed_hash


def prompt_indices(
    dataset_len: int, seed: int, step: int, prompts_per_step: int, *, shuffle: bool = True
) -> list[tuple[int, int]]:
    """(global prompt index, dataset index) of each prompt of a step, in order.

    Prompt ``i`` of ``step`` (from 0) has the global index ``g = step * prompts_per_step + i``. Epoch ``g // n`` walks
    once through all ``n`` examples in its own order, so a step may span the end of one epoch and the start of the next.

    Raises:
        ValueError: an argument is out of range.
    """
    if dataset_len < 1 or prompts_per_step < 1 or step < 0:
        raise ValueError(f"no prompts for {dataset_len=}, {prompts_per_step=}, {step=}")
    return indices_from(dataset_len, seed, step * prompts_per_step, prompts_per_step, shuffle=shuffle)


def indices_from(dataset_len: int, seed: int, first: int, count: int, *, shuffle: bool = True) -> list[tuple[int, int]]:
    """(global prompt index, dataset index) of ``count`` prompts from global index ``first`` on."""
    indices = range(first, first + count)
    return [(index, _dataset_index(dataset_len, seed, index, shuffle=shuffle)) for index in indices]


def _dataset_index(dataset_len: int, seed: int, index: int, *, shuffle: bool) -> int:
    epoch, place = divmod(index, dataset_len)
    return epoch_order(dataset_len, seed, epoch)[place] if shuffle else place


@lru_cache(maxsize=4)
def epoch_order(dataset_len: int, seed: int, epoch: int) -> tuple[int, ...]:
    """A permutation of range(dataset_len): indices sorted by keyed hash of (seed, epoch, index), ties by index."""
    key = derive_key("data order", seed)
    return tuple(sorted(range(dataset_len), key=lambda index: (keyed_hash(key, epoch, index), index)))
