"""Experts over two ranks on gloo have the bits of one rank; other providers are refused with the reason."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from glm5_ranks import main
from glm5_support import assert_same, unequal

from vime_core.errors import PolicyError
from vime_glm5.ranks import providers
from vime_glm5.ranks.deep_ep import payload_of
from vime_glm5.ranks.providers import refusal_of, require
from vime_glm5.source import RandomGlm5Options, make_random_glm5


def run(task: str, place: Path, model: str = "", size: int = 2) -> list[Any]:
    place.mkdir(exist_ok=True)
    mp.spawn(main, (size, str(place), task, model), nprocs=size)
    return [torch.load(place / f"rank{rank}.pt") for rank in range(size)]


def test_rows_and_gradients_are_those_of_one_rank(tmp_path: Path) -> None:
    by_rank = run("experts", tmp_path)
    for found in by_rank:
        assert len(found) == 4
        for choice, results in found.values():
            alone = results["alone"]
            for provider in ("collective", "deep_ep"):
                assert_same(results[provider][0], alone[0])
                assert_same(results[provider][1], alone[1])
                assert results[provider][0].shape[:2] == choice.shape
            assert_same(results["deep_ep"][2], results["collective"][2])
            assert unequal(alone[0][:, 0], alone[0][:, 1]) > 100
    check_weight_gradients(by_rank)


def check_weight_gradients(by_rank: list[Any]) -> None:
    """An expert's gradient is over the routes of both ranks: the sum of what each rank alone would have."""
    for name in by_rank[0]:
        alone = [found[name][1]["alone"][2] for found in by_rank]
        for rank, found in enumerate(by_rank):
            for number, gradient in enumerate(found[name][1]["collective"][2]):
                expert = 8 * (number // 4) + 4 * rank + number % 4  # first matrices, then second ones
                wanted = alone[0][expert].double() + alone[1][expert].double()
                assert (gradient.double() - wanted).norm() <= 0.01 * wanted.norm()


WRONG = {
    "an order of its own": "against",
    "a route lost": "by route",
    "one bit of a weight": "weight of route 2",
    "another expert": "expert of route 2",
    "another slot": "slot of route 2",
}


def test_routes_that_are_not_those_of_the_hidden_states_are_named(tmp_path: Path) -> None:
    for said in run("refused", tmp_path, ",".join(WRONG)):
        assert {name for name in said if name not in WRONG} == {"uneven, collective", "uneven, deep_ep"}
        for fault, words in WRONG.items():
            assert said[fault].startswith("VIME-ALIGN-077")
            assert words in said[fault], said[fault]
        assert all(said[name].startswith("VIME-ALIGN-075") for name in said if name not in WRONG)


def test_a_payload_is_32_bytes_with_the_exact_weight() -> None:
    choice, weights = torch.tensor([[6, 1, 0], [3, 7, 255]]), torch.rand(2, 3) + 2.0**-30
    payload = payload_of(choice, weights)
    assert payload.shape == (6, 16)
    words = payload.view(torch.int32)
    assert words[:, 0].tolist() == [6, 1, 0, 3, 7, 255]
    assert_same(words[:, 1].contiguous().view(torch.float32), weights.flatten())
    assert words[:, 2:4].tolist() == [[t, s] for t in range(2) for s in range(3)]
    assert not words[:, 4:].any()


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
        ("alltoall", "Megatron's dispatcher 'alltoall' adds the rows"),
        ("flex", "Megatron's dispatcher 'flex' adds the rows"),
        ("pigeon", "no such provider; known are collective, deep_ep"),
    ],
)
def test_other_providers_are_refused_with_the_reason(name: str, why: str) -> None:
    assert why in refusal_of(name)
    with pytest.raises(PolicyError, match="VIME-ALIGN-074") as error:
        require(name, 2, 160)
    assert repr(name) in error.value.message


def test_deep_ep_is_probed_by_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine and a package that have less and less of what is needed, and last all of it."""

    class Old:
        get_dispatch_layout = dispatch = combine = get_dispatch_config = get_combine_config = staticmethod(few)

    monkeypatch.setattr(providers, "find_spec", lambda _: object())
    assert "needs GPUs" in refusal_of("deep_ep", 2, 160)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert "has 8.0" in refusal_of("deep_ep", 2, 160)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert "hidden_size = 168 gives 336" in refusal_of("deep_ep", 2, 168)
    assert "cannot be imported" in refusal_of("deep_ep", 2, 160)
    monkeypatch.setitem(sys.modules, "deep_ep", SimpleNamespace(ElasticBuffer=object))
    assert "has no Buffer.get_dispatch_layout" in refusal_of("deep_ep", 2, 160)
    monkeypatch.setitem(sys.modules, "deep_ep", SimpleNamespace(Buffer=Old))
    assert "no configuration for 3 ranks" in refusal_of("deep_ep", 3, 160)
    assert refusal_of("deep_ep", 2, 160) == ""


def few(ranks: int) -> None:
    assert ranks in (2, 4, 8)
