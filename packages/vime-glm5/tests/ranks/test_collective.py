"""Experts over two ranks on gloo have the bits of one rank; other providers are refused with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from glm5_ranks import main
from glm5_support import assert_same, unequal

from vime_core.errors import PolicyError
from vime_glm5.ranks.providers import open_ranks, refusal_of
from vime_glm5.source import RandomGlm5Options, make_random_glm5


def run(task: str, place: Path, model: str = "", size: int = 2) -> list[Any]:
    place.mkdir(exist_ok=True)
    mp.spawn(main, (size, str(place), task, model), nprocs=size)
    return [torch.load(place / f"rank{rank}.pt") for rank in range(size)]


def test_rows_and_token_gradients_are_those_of_one_rank(tmp_path: Path) -> None:
    by_rank = run("experts", tmp_path)
    for found in by_rank:
        assert len(found) == 4
        for choice, over, alone in found.values():
            assert_same(over[0], alone[0])
            assert_same(over[1], alone[1])
            assert unequal(over[0][:, 0], alone[0][:, 1]) > 100
            assert over[0].shape[:2] == choice.shape
    check_weight_gradients(by_rank)


def check_weight_gradients(by_rank: list[Any]) -> None:
    """An expert's gradient is over the routes of both ranks: the sum of what each rank alone would have."""
    for name in by_rank[0]:
        alone = [found[name][2][2] for found in by_rank]
        for rank, found in enumerate(by_rank):
            for number, gradient in enumerate(found[name][1][2]):
                expert = 4 * rank + number
                wanted = alone[0][expert].double() + alone[1][expert].double()
                assert (gradient.double() - wanted).norm() <= 0.01 * wanted.norm()


def test_log_probs_of_a_model_are_those_of_one_rank(tmp_path: Path) -> None:
    options = RandomGlm5Options.model_validate({"layers": 4, "dense_layers": 1, "index_top_k": 16})
    model = make_random_glm5(options, tmp_path / "cache")
    tokens = 0
    for over, alone in run("whole_model", tmp_path / "run", str(model)):
        assert_same(over, alone)
        assert float(alone.std()) > 0.5
        tokens += len(alone)
    assert tokens == 29 + 42
    print(f"EP 1 against EP 2: {tokens} log-probs, 0 unequal")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("deep_ep", "deep_ep is not installed"),
        ("megatron", "before they are back with its owner"),
        ("pigeon", "no such provider"),
    ],
)
def test_other_providers_are_refused_with_the_reason(name: str, why: str) -> None:
    assert why in refusal_of(name)
    group: Any = None
    with pytest.raises(PolicyError, match="VIME-ALIGN-074") as error:
        open_ranks(name, group, 8)
    assert repr(name) in error.value.message
