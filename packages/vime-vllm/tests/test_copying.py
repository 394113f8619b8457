"""Copies of many tensors at once have the bits of copies one by one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vime_vllm.copying import copy_all

DTYPES = (torch.bfloat16, torch.float32, torch.uint8, torch.float8_e4m3fn)
PAIRS = st.lists(
    st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 9), max_size=3), st.integers(0, 3), st.booleans()),
    max_size=8,
)


def _bits(dtype: torch.dtype, shape: list[int], offset: int, seed: int) -> Tensor:
    """Any bits at all, ``offset`` elements after the start of the memory."""
    count = (torch.Size(shape).numel() + offset) * dtype.itemsize
    drawn = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return drawn.view(dtype)[offset:].view(shape)


@settings(max_examples=80, deadline=None)
@given(PAIRS)
def test_every_bit_is_copied_and_nothing_else(described: list[tuple[torch.dtype, list[int], int, bool]]) -> None:
    targets, sources, wanted = list[Tensor](), list[Tensor](), list[Tensor]()
    for seed, (dtype, shape, offset, turned) in enumerate(described):
        source, target = _bits(dtype, shape, offset, seed), _bits(dtype, shape, 0, 99 + seed)
        sources.append(source.mT if turned and len(shape) > 1 else source)
        targets.append(target.mT if turned and len(shape) > 1 else target)
        wanted.append(sources[-1].clone())
    copy_all(targets, sources)
    for target, one in zip(targets, wanted, strict=True):
        assert torch.equal(target.contiguous().view(-1).view(torch.uint8), one.contiguous().view(-1).view(torch.uint8))


def test_a_part_of_a_parameter_is_filled_and_its_neighbours_stay() -> None:
    parameter = torch.nn.Parameter(torch.zeros(6, 4, dtype=torch.bfloat16))
    copy_all([parameter.data[2:4]], [torch.ones(2, 4, dtype=torch.bfloat16)])
    assert parameter.sum(1).tolist() == [0.0, 0.0, 4.0, 4.0, 0.0, 0.0]


def test_another_dtype_is_converted() -> None:
    target = torch.zeros(8, dtype=torch.bfloat16)
    copy_all([target], [torch.full((8,), 1.5)])
    assert target.tolist() == [1.5] * 8


@pytest.mark.parametrize("sources", [[torch.zeros(8)], [torch.zeros(4, 2)], []])
def test_what_does_not_fit_is_refused(sources: list[Tensor]) -> None:
    with pytest.raises(ValueError, match=r"does not fit|shorter"):
        copy_all([torch.zeros(2, 4)], sources)
