"""Many tensors copied by few launches: a model's hundreds of small copies cost more in launches than in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, cast

import torch
from torch import Tensor

_WORD: Final = torch.int64


@torch.no_grad()
def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source to the target of its place, converting dtypes as ``copy_`` does; bits stay where they agree.

    Pairs of plain memory are copied as 64-bit words: one dtype for all, so that one launch takes many of them.

    Raises:
        ValueError: unequally many, or shapes that differ.
    """
    words: tuple[list[Tensor], list[Tensor]] = [], []
    for target, source in zip(targets, sources, strict=True):
        if target.shape != source.shape:
            raise ValueError(f"a tensor of shape {tuple(source.shape)} does not fit {tuple(target.shape)}")
        if _is_plain(target) and _is_plain(source) and (target.dtype, target.device) == (source.dtype, source.device):
            words[0].append(_as_words(target))
            words[1].append(_as_words(source))
        else:
            target.copy_(source)
    if words[0]:
        cast("Any", torch)._foreach_copy_(*words)


def _is_plain(tensor: Tensor) -> bool:
    """Whether its bytes are whole words, one after another."""
    size = tensor.element_size()
    start = tensor.storage_offset() * size
    return tensor.nbytes % _WORD.itemsize == 0 and start % _WORD.itemsize == 0 and tensor.is_contiguous()


def _as_words(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(_WORD)
