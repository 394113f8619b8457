"""What the benchmarks make of what they measured, and that a side which fails says so and waits for nobody."""

from __future__ import annotations

import math
import re
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return import_module("gpu")


@pytest.fixture
def timings(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS / "h200")
    return import_module("timings")


def two(timings: ModuleType, **unequal: int) -> list[Any]:
    return [
        timings.Timing("q", 1, {"cuBLAS": 8.0, "own": 4.0, "auto": 16.0}, unequal),
        timings.Timing("o", 1, {"cuBLAS": 8.0, "own": 16.0, "auto": 4.0}),
    ]


def test_the_fastest_is_chosen_for_each_shape(timings: ModuleType) -> None:
    assert timings.rows(two(timings), ["own", "auto"]) == [
        ["q", 1, 8.0, 2.0, 0.5, "own", 2.0, 0],
        ["o", 1, 8.0, 0.5, 2.0, "auto", 2.0, 0],
    ]
    assert timings.means(two(timings), ["own", "auto"], [1]) == [
        ["own", pytest.approx(1.0), pytest.approx(1.0)],
        ["auto", pytest.approx(1.0), pytest.approx(1.0)],
        ["fastest", pytest.approx(2.0), pytest.approx(2.0)],
    ]


def test_kernels_with_other_bits_are_no_choice(timings: ModuleType) -> None:
    found = two(timings, auto=3)
    assert timings.rows(found, ["own", "auto"])[0] == ["q", 1, 8.0, 2.0, 0.5, None, None, 3]
    own, _, fastest = timings.means(found, ["own", "auto"], [1])
    assert own[1] == pytest.approx(1.0)
    assert math.isnan(fastest[1])


def test_a_mean_without_one_of_its_shapes_is_not_a_number(timings: ModuleType) -> None:
    found = [*two(timings), timings.Timing("down", 4096, {"cuBLAS": 8.0, "own": 8.0})]
    own, auto, fastest = timings.means(found, ["own", "auto"], [1, 4096])
    assert own[1:] == [pytest.approx(1.0)] * 3
    assert math.isnan(auto[2])
    assert math.isnan(auto[3])
    assert fastest[2] == pytest.approx(1.0)


def test_the_table_compares_every_side_with_stock(gpu: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    measured = {
        ("rollout", 64): {"stock": [90.0, 100.0, 300.0], "own": [50.0], "auto": [80.0, 120.0]},
        ("train_each",): {"stock": [10.0]},
        ("update",): {"stock": [4.0], "own": [8.0]},
    }
    gpu.print_table("shape", ["stock", "own", "auto"], measured)
    lines = {line[:28].strip(): line[28:].split() for line in capsys.readouterr().out.splitlines()}
    assert lines["rollout 64, tokens/s"] == ["100.0", "50.0", "100.0", "0.50", "1.00"]
    assert lines["train each, tokens/s"] == ["10.0"]
    assert lines["update, ms a GB"] == ["250.00", "125.00"]


def test_a_side_that_cannot_start_ends_with_its_error(gpu: ModuleType, tmp_path: Path) -> None:
    absent = tmp_path / "absent.toml"
    with (
        pytest.raises(gpu.SideError, match=r"(?s)own: .*VIME-CONFIG-001.*absent\.toml"),
        gpu.opened(["own"], [absent], {"own": []}),
    ):
        pytest.fail("it started")


class Runner:
    """What a profile watches of a model runner."""

    def execute_model(self, scheduler_output: SimpleNamespace) -> str:
        return f"ran {scheduler_output.total_num_scheduled_tokens}"

    def sample_tokens(self) -> str:
        return "sampled"


def test_a_profile_counts_decode_steps_of_its_requests_and_leaves_the_runner_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    engine_profile, runner = import_module("engine_profile"), Runner()
    worker = SimpleNamespace(model_runner=runner)
    engine_profile.begin(worker, 2, False)
    for tokens in ([64, 64], [1, 1], [1, 1], [1, 1], [1]):
        scheduled = SimpleNamespace(total_num_scheduled_tokens=sum(tokens), num_scheduled_tokens=tokens)
        assert runner.execute_model(scheduled) == f"ran {sum(tokens)}"
        assert runner.sample_tokens() == "sampled"
    found = engine_profile.end(worker, 3)
    assert re.fullmatch(
        r"3 decode steps, from one to the next [\d.]+ ms, of it execute_model [\d.]+ ms, sample_tokens [\d.]+ ms", found
    )
    assert not vars(runner)
