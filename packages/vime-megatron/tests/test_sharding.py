"""Parts of parameters under tensor parallelism, and sums over ranks, on real process groups."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vime_core.errors import ConfigError
from vime_megatron.sharding import Split, refuse_indivisible
from vime_megatron.structures.dense import QWEN2
from vime_megatron.testing import hf_model

HELPER = Path(__file__).parent / "support" / "ranks.py"


def run_ranks(task: str, world: int, tensor_parallel: int, model: Path, place: Path) -> list[Any]:
    """What each of several processes says of a task of support/ranks.py, by rank."""
    place.mkdir()
    common = [str(world), str(tensor_parallel), str(model), str(place)]
    started = [
        subprocess.Popen(
            [sys.executable, str(HELPER), task, str(rank), *common],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(world)
    ]
    said = [process.communicate(timeout=900)[0] for process in started]
    assert [process.returncode for process in started] == [0] * world
    return [json.loads(text.splitlines()[-1]) for text in said]


@given(st.integers(1, 4), st.sampled_from([1, 2]), st.integers(0, 1), st.integers(1, 3), st.integers(1, 3))
def test_the_parts_of_a_tensor_are_the_whole(size: int, stride: int, dim: int, rows: int, columns: int) -> None:
    shape = [rows, columns]
    shape[dim] *= size * stride
    whole = torch.arange(shape[0] * shape[1]).view(shape)
    split = Split(dim, stride, size)
    parts = [split.part(whole, rank) for rank in range(size)]
    assert torch.equal(split.join(parts), whole)
    block = shape[dim] // stride
    by_hand = [whole.narrow(dim, block * number, block // size) for number in range(stride)]
    assert torch.equal(parts[0], torch.cat(by_hand, dim))


def test_what_does_not_divide_is_refused_by_name() -> None:
    blueprint = QWEN2.blueprint(json.loads(hf_model("qwen2").config.to_json_string(use_diff=False)))
    refuse_indivisible(blueprint, 2)
    with pytest.raises(ConfigError, match="tensor_parallel = 3 does not divide the model's num_query_groups = 2"):
        refuse_indivisible(blueprint, 3)


def test_ranks_are_added_from_the_first_one_upwards(tmp_path: Path) -> None:
    found = run_ranks("sum", 3, 1, tmp_path, tmp_path / "ranks")
    parts = [np.array(values, np.float32) for values in ([1e8, 1.0, -0.0], [1.0, 1e8, -0.0], [-1e8, -1e8, -0.0])]
    expected = ((parts[0] + parts[1]) + parts[2]).tolist()
    assert expected[:2] != ((parts[2] + parts[1]) + parts[0]).tolist()[:2], "the order must show"
    for rank in found:
        assert rank["sum"] == expected
        assert rank["joined"] == [0.0, 1.0, 2.0, 3.0, 4.0]
        assert rank["by_microbatch"] == [0, 10, 20, 30, 40]


@pytest.mark.parametrize(("kind", "tensor_parallel"), [("qwen3", 2), ("llama", 1)], ids=["tensor", "data"])
def test_two_ranks_train_as_one_does(kind: str, tensor_parallel: int, tmp_path: Path) -> None:
    model = tmp_path / "model"
    hf_model(kind).save_pretrained(model)
    (one,) = run_ranks("train", 1, 1, model, tmp_path / "one")
    two = run_ranks("train", 2, tensor_parallel, model, tmp_path / "two")
    assert two[0] == two[1], "the ranks agree on every number"
    assert two[0]["resumed"] == two[0]["straight"]
    assert two[0]["shapes"] == one["shapes"]
    assert two[0]["initial"] == one["initial"]
    assert two[0]["loss"] == pytest.approx(one["loss"], rel=1e-5)
    assert two[0]["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)
    for name, values in one["gradients"].items():
        difference = np.abs(np.array(two[0]["gradients"][name]) - values).max()
        assert difference < 1e-5 * np.abs(values).max(), name
