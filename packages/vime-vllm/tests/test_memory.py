"""A GPU's memory is shared once and mapped once, however many updates pass through it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vime_vllm import memory
from vime_vllm.memory import CudaBucket, CudaMapping
from vime_vllm.wire import CudaExport, CudaMemory

HOST = torch.device("cpu")


def _memory(number: int, nbytes: int) -> CudaMemory:
    export = CudaExport(
        handle=bytes([number]), storage_bytes=nbytes, storage_offset=0, ref_counter=b"", ref_counter_offset=0,
        event=b"", event_sync=False,
    )  # fmt: skip
    return CudaMemory(device_uuid="GPU-1", nbytes=nbytes, exports=[export])


def test_a_bucket_is_shared_again_only_where_it_must_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    shared: list[int] = []

    def share(flat: Tensor, readers: int) -> CudaMemory:
        assert readers == 1
        shared.append(flat.numel())
        return _memory(len(shared), flat.numel())

    monkeypatch.setattr(memory, "_share_cuda", share)
    bucket = CudaBucket(1)
    first, flat = bucket.on(HOST, 64)
    assert bucket.on(HOST, 32) == (first, flat)
    assert bucket.on(HOST, 65)[0] != first
    assert shared == [64, 65]
    bucket.release()
    assert bucket.on(HOST, 1)[1].numel() == 1


def test_a_reader_maps_a_memory_once(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[bytes] = []

    def open_cuda(given: CudaMemory, rank: int) -> Tensor:
        opened.append(given.exports[rank].handle)
        return torch.zeros(given.nbytes, dtype=torch.uint8)

    monkeypatch.setattr(memory, "open_cuda", open_cuda)
    mapping = CudaMapping(0)
    for number in (1, 1, 2, 2, 1):
        assert mapping.bytes_of(_memory(number, 8)).numel() == 8
    assert opened == [b"\x01", b"\x02", b"\x01"]
