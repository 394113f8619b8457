"""A trainer whose experts are spread over two ranks, against one rank: forward bits, weights, a step, a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from glm5_support import assert_same, unequal
from glm5_trainer_ranks import main

from vime_glm5.source import RandomGlm5Options, make_random_glm5

SMALL = {"layers": 4, "dense_layers": 2, "index_offset": 2, "index_top_k": 16}
Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_glm5(RandomGlm5Options.model_validate(SMALL), tmp_path_factory.mktemp("cache"))


def run(size: int, place: Path, model: Path, *, spoiled: bool = False) -> Found:
    place.mkdir(parents=True, exist_ok=True)
    mp.spawn(main, (size, str(place), str(model), spoiled), nprocs=size)
    return [torch.load(place / f"rank{rank}.pt", weights_only=False) for rank in range(size)]


@pytest.fixture(scope="module")
def one(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(1, tmp_path_factory.mktemp("one"), model)[0]


@pytest.fixture(scope="module")
def two(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run(2, tmp_path_factory.mktemp("two"), model)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    assert list(a) == list(b)
    assert a
    return all(unequal(a[name], b[name]) == 0 for name in a)


def test_each_rank_holds_its_experts(one: dict[str, Any], two: Found) -> None:
    assert {shape[0] for shape in one["held"].values()} == {8}
    for found in two:
        assert list(found["held"]) == list(one["held"])
        assert {shape[0] for shape in found["held"].values()} == {4}
        assert found["settings"]["experts"] == "over 2 ranks by collective"
        assert (found["settings"]["expert_parallel"], found["settings"]["data_parallel"]) == (2, 2)


def test_log_probs_have_the_bits_of_one_rank(one: dict[str, Any], two: Found) -> None:
    """Three microbatches: one rank has one more than the other."""
    for found in two:
        assert_same(found["log_probs"], one["log_probs"])
        assert_same(found["training_log_probs"], one["log_probs"])
    assert float(one["log_probs"].std()) > 0.5
    print(f"EP 1 against EP 2: {len(one['log_probs'])} log-probs, 0 unequal")


def test_weights_for_the_engine_are_whole_on_every_rank(one: dict[str, Any], two: Found) -> None:
    assert all(same(found["weights"], one["weights"]) for found in two)


def test_a_step_is_that_of_one_rank_but_for_the_order_of_its_sums(one: dict[str, Any], two: Found) -> None:
    """A weight's gradient is one product over the rows of all ranks, not one a microbatch."""
    for found in two:
        assert same(found["gradients"], two[0]["gradients"])
        assert same(found["after"], two[0]["after"])
        for name, gradient in one["gradients"].items():
            error = (found["gradients"][name].double() - gradient.double()).norm() / gradient.double().norm()
            assert error < 0.02, (name, float(error))
        assert found["norm"] == pytest.approx(one["norm"], rel=1e-3)
        assert found["loss"] == pytest.approx(one["loss"], rel=1e-5)


def test_a_checkpoint_comes_back(two: Found) -> None:
    for found in two:
        assert same(found["loaded"], found["after"])
        weights = {name: found["after"][name] for name in found["later"]}
        assert not same(found["later"], weights)


def test_a_wrong_row_of_another_ranks_expert_shows(one: dict[str, Any], model: Path, tmp_path: Path) -> None:
    for found in run(2, tmp_path / "spoiled", model, spoiled=True):
        assert unequal(found["log_probs"], one["log_probs"]) > 0
