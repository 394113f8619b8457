"""The engine sees its own GPUs first, and the trainer's behind them."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from vime_core.errors import ConfigError
from vime_vllm.gpus import visible_order
from vime_vllm.options import VllmOptions


@pytest.mark.parametrize(
    ("gpus", "visible", "count", "expected"),
    [
        ((1,), None, 2, "1,0"),
        ((1,), "4,6", 2, "6,4"),
        ((2, 1), None, 4, "2,1,0,3"),
        ((0,), "GPU-a, GPU-b", 2, "GPU-a,GPU-b"),
        ((1,), "3,5,9", 2, "5,3"),
    ],
)
def test_the_order(gpus: tuple[int, ...], visible: str | None, count: int, expected: str) -> None:
    assert visible_order(gpus, visible, count) == expected


def test_an_absent_gpu_is_named() -> None:
    with pytest.raises(ConfigError, match=r"names GPU 2, but 2 are visible here \(CUDA_VISIBLE_DEVICES = '0,1'\)"):
        visible_order((0, 2), "0,1", 2)


@pytest.mark.parametrize(("gpus", "ranks"), [((0, 1), 1), ((1,), 2), ((1, 1), 2)])
def test_one_gpu_a_rank(gpus: tuple[int, ...], ranks: int) -> None:
    with pytest.raises(ValidationError, match="different GPUs"):
        VllmOptions(gpus=gpus, tensor_parallel_size=ranks)


@pytest.mark.parametrize("gpus", [(-1,), ("x",), (0.5,)])
def test_a_gpu_is_a_number(gpus: tuple[object, ...]) -> None:
    with pytest.raises(ValidationError):
        VllmOptions.model_validate({"gpus": gpus})
