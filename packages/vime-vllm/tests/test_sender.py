"""Exactly the engine's tensors are sent, in chunks of bounded size."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vime_core.errors import ContractViolation
from vime_vllm import sender
from vime_vllm.memory import CudaBucket, open_shared_memory, shared_memory_in_use
from vime_vllm.sender import TensorForm, send_weights
from vime_vllm.wire import Chunk, SharedMemory, dtype_name, lay_out, views

WEIGHTS = {f"layer.{place}.weight": torch.full((4, 8), float(place), dtype=torch.bfloat16) for place in range(5)}
EXPECTED = {name: TensorForm("bfloat16", (4, 8)) for name in WEIGHTS}


class Receiver:
    """Reads chunks as an engine does."""

    def __init__(self) -> None:
        self.chunks: list[list[str]] = []
        self.tensors: dict[str, Tensor] = {}
        self.versions: set[int] = set()
        self.places: list[tuple[bool, bool]] = []

    def __call__(self, chunk: Chunk) -> None:
        assert isinstance(chunk.memory, SharedMemory)
        flat = open_shared_memory(chunk.memory)
        self.chunks.append([field.name for field in chunk.tensors])
        named = zip(self.chunks[-1], views(chunk.tensors, flat), strict=True)
        self.tensors |= {name: view.clone() for name, view in named}
        self.versions.add(chunk.version)
        self.places.append((chunk.first, chunk.last))


@pytest.mark.parametrize(("limit", "sizes"), [(10**9, [5]), (128, [2, 2, 1]), (64, [1] * 5), (1, [1] * 5)])
def test_chunks_are_as_large_as_allowed(monkeypatch: pytest.MonkeyPatch, limit: int, sizes: list[int]) -> None:
    monkeypatch.setattr(sender, "CHUNK_BYTES", limit)
    receiver = Receiver()
    send_weights(iter(WEIGHTS.items()), 4, EXPECTED, receiver, CudaBucket(1))
    assert [len(chunk) for chunk in receiver.chunks] == sizes
    assert list(receiver.tensors) == list(WEIGHTS)
    assert all(torch.equal(receiver.tensors[name], WEIGHTS[name]) for name in WEIGHTS)
    assert receiver.versions == {4}
    assert receiver.places == [(number == 0, number == len(sizes) - 1) for number in range(len(sizes))]
    assert shared_memory_in_use() == []


def _sends(weights: list[tuple[str, Tensor]]) -> str:
    with pytest.raises(ContractViolation) as caught:
        send_weights(iter(weights), 1, EXPECTED, Receiver(), CudaBucket(1))
    assert shared_memory_in_use() == []
    return caught.value.message


@pytest.mark.parametrize(("limit", "delivered"), [(10**9, 0), (64, 3)])
def test_the_last_chunk_waits_for_every_tensor(monkeypatch: pytest.MonkeyPatch, limit: int, delivered: int) -> None:
    """It lets the engine take the new version."""
    monkeypatch.setattr(sender, "CHUNK_BYTES", limit)
    receiver = Receiver()
    with pytest.raises(ContractViolation, match=r"'layer\.4\.weight' is held by the engine but was not sent"):
        send_weights(iter(list(WEIGHTS.items())[:-1]), 1, EXPECTED, receiver, CudaBucket(1))
    assert [last for _, last in receiver.places] == [False] * delivered


def test_no_tensors_are_an_error_too() -> None:
    assert "'layer.0.weight' is held by the engine but was not sent (5 such" in _sends([])


def test_a_gpus_memory_has_room_for_all_that_a_small_model_sends() -> None:
    named = [("a", torch.zeros(5)), ("b", torch.zeros(0, 3)), ("c", torch.zeros(2, 50).bfloat16())]
    forms = {name: TensorForm(dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in named}
    assert sender._bucket_bytes(forms) == lay_out(named)[1] == 64 + 256


def test_a_missing_tensor_is_named() -> None:
    assert "'layer.4.weight' is held by the engine but was not sent (1 such" in _sends(list(WEIGHTS.items())[:-1])


def test_an_unexpected_tensor_is_named() -> None:
    assert "'lm_head.weight' was sent, but the engine holds no such" in _sends(
        [*WEIGHTS.items(), ("lm_head.weight", torch.zeros(1))]
    )


def test_a_tensor_sent_twice_is_named() -> None:
    assert "'layer.0.weight' was sent twice" in _sends([*WEIGHTS.items(), *WEIGHTS.items()])


@pytest.mark.parametrize("other", [torch.zeros(4, 8), torch.zeros(8, 4, dtype=torch.bfloat16)])
def test_another_dtype_or_shape_is_named(other: Tensor) -> None:
    assert "'layer.2.weight' was sent as" in _sends(list({**WEIGHTS, "layer.2.weight": other}.items()))


def test_an_engine_that_fails_leaves_no_memory_behind() -> None:
    def fail(chunk: Chunk) -> None:
        raise RuntimeError(str(chunk.version))

    with pytest.raises(RuntimeError):
        send_weights(iter(WEIGHTS.items()), 1, EXPECTED, fail, CudaBucket(1))
    assert shared_memory_in_use() == []
