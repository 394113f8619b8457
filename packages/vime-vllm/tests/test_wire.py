"""Weights survive the way through shared memory bit for bit, and malformed chunks do not get in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from vime_core.errors import BackendError
from vime_vllm.memory import new_shared_memory, open_shared_memory, shared_memory_in_use
from vime_vllm.wire import ALIGNMENT, DTYPES, Chunk, SharedMemory, TensorField, lay_out, pack, views

TENSORS = st.lists(
    st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 5), max_size=3), st.integers(0, 2**31)),
    min_size=1,
    max_size=6,
)


def _random(dtype: str, shape: list[int], seed: int) -> Tensor:
    """Any bits at all, NaN payloads included."""
    count = torch.Size(shape).numel() * DTYPES[dtype].itemsize
    bits = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return bits.view(DTYPES[dtype]).view(shape)


def _bits(tensor: Tensor) -> list[int]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


@settings(max_examples=60, deadline=None)
@given(TENSORS)
def test_every_bit_arrives(described: list[tuple[str, list[int], int]]) -> None:
    named = [(str(place), _random(*one)) for place, one in enumerate(described)]
    fields, nbytes = lay_out(named)
    with new_shared_memory(max(nbytes, 1)) as (memory, flat):
        pack(named, fields, flat)
        sent = Chunk(version=3, first=True, last=False, tensors=list(fields), memory=memory)
        chunk = Chunk.model_validate(sent.fields())
        assert isinstance(chunk.memory, SharedMemory)
        received = open_shared_memory(chunk.memory)
        found = zip(named, chunk.tensors, views(chunk.tensors, received), strict=True)
        for (name, tensor), field, view in found:
            assert field.name == name
            assert field.offset % ALIGNMENT == 0
            assert (view.shape, view.stride(), view.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
            assert _bits(view) == _bits(tensor)


def test_a_strided_tensor_arrives_in_row_major_order() -> None:
    tensor = torch.arange(12, dtype=torch.float32).view(3, 4).t()
    fields, nbytes = lay_out([("w", tensor)])
    flat = torch.zeros(nbytes, dtype=torch.uint8)
    pack([("w", tensor)], fields, flat)
    assert torch.equal(views(fields, flat)[0], tensor)


def _chunk(**changes: Any) -> dict[str, Any]:
    field = {"name": "w", "dtype": "bfloat16", "shape": [2, 3], "offset": 0}
    memory = {"kind": "shared_memory", "name": "vime-1-" + "0" * 32, "nbytes": 64}
    return {"version": 1, "first": True, "last": True, "tensors": [{**field, **changes}], "memory": memory}


def test_a_well_formed_chunk_is_accepted() -> None:
    Chunk.model_validate(_chunk())


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "float64"},
        {"dtype": "__class__"},
        {"shape": [2, -3]},
        {"shape": [100, 100]},
        {"offset": 60},
        {"offset": "0"},
        {"name": 3},
        {"pickle": b"\x80\x04."},
    ],
)
def test_a_malformed_chunk_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Chunk.model_validate(_chunk(**changes))


def test_memory_is_unlinked_when_the_sender_fails() -> None:
    def fail() -> None:
        with new_shared_memory(8) as (memory, _):
            assert shared_memory_in_use() == [memory.name]
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert shared_memory_in_use() == []


def test_a_reader_cannot_change_what_was_sent() -> None:
    with new_shared_memory(8) as (memory, flat):
        flat.fill_(7)
        open_shared_memory(memory).fill_(9)
        assert open_shared_memory(memory).tolist() == [7] * 8


@pytest.mark.parametrize("name", ["../etc/passwd", "vime-1-xyz", "vime-1-" + "0" * 31 + "/", ""])
def test_only_names_that_vime_gives_are_opened(name: str) -> None:
    with pytest.raises(ValueError, match="not a name"):
        open_shared_memory(SharedMemory(name=name, nbytes=1))


def test_a_wrong_size_is_refused() -> None:
    with new_shared_memory(8) as (memory, _), pytest.raises(ValueError, match="9 bytes"):
        open_shared_memory(SharedMemory(name=memory.name, nbytes=9))


def test_a_full_disk_is_an_error_and_not_a_dead_process() -> None:
    with pytest.raises(BackendError, match="no room") as caught, new_shared_memory(2**50):
        pytest.fail("2**50 bytes fitted")
    assert "--shm-size" in caught.value.remedy
    assert shared_memory_in_use() == []


def test_a_view_writes_to_its_bytes_and_to_no_others() -> None:
    whole = torch.zeros(192, dtype=torch.uint8)
    views([TensorField(name="w", dtype="float32", shape=[2], offset=64)], whole[60:])[0].fill_(-1.0)
    assert whole.nonzero().flatten().tolist() == [126, 127, 130, 131]


@pytest.mark.parametrize("changes", [{"offset": 128}, {"offset": 8}, {"shape": [33]}])
def test_no_view_goes_beyond_the_bytes(changes: dict[str, Any]) -> None:
    """Not even where their memory goes on."""
    field = TensorField(**{"name": "w", "dtype": "float32", "shape": [16], "offset": 64, **changes})
    with pytest.raises(ValueError, match="'w' does not lie within 160 bytes"):
        views([field], torch.zeros(512, dtype=torch.uint8)[:160])


def test_a_layout_is_that_of_the_tensors_at_hand() -> None:
    """It is remembered, and the next update may send others under the same names."""
    assert lay_out([("a", torch.zeros(3, 5)), ("b", torch.zeros(7))])[1] == 128
    fields, nbytes = lay_out([("a", torch.zeros(5, 5)), ("b", torch.zeros(7))])
    assert ([field.shape for field in fields], nbytes) == ([[5, 5], [7]], 192)
    assert lay_out([("a", torch.zeros(3, 5).bfloat16()), ("b", torch.zeros(7))])[0][0].dtype == "bfloat16"


def test_shared_memory_lies_where_it_says() -> None:
    with new_shared_memory(8) as (memory, _):
        assert (Path("/dev/shm") / memory.name).stat().st_mode & 0o077 == 0
