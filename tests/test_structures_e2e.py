"""Trainer and engine give the same bits on random structures that nobody tuned them to.

A real engine and a real trainer for each structure: log-probs of the scoring forward, of the training forward and of
the engine, before and after two optimizer steps with online updates. ``VIME_STRUCTURES`` says how many (30), and from
which seed on (``VIME_STRUCTURES=50:1000``); ``nox -s long`` takes 300.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from vime_core.alignment import Alignment
from vime_core.determinism.environment import exactly
from vime_core.determinism.policy import REPRODUCIBLE
from vime_core.errors import ConfigError, PolicyError
from vime_core.loop.sides import Sides, checked_policy, open_sides, ready_parts
from vime_core.numerics import DENSE_V1
from vime_core.testing.runs import load_run, mixed_requests, write_run
from vime_core.testing.structures import RandomStructure, random_structure
from vime_core.verify.align_live import AlignOptions, verify_align
from vime_core.verify.live import with_learning_rate
from vime_core.verify.verdict import Verdict

pytestmark = [pytest.mark.slow, pytest.mark.engine]

COUNT, _, FIRST = os.environ.get("VIME_STRUCTURES", "30").partition(":")
SEEDS = range(int(FIRST or 0), int(FIRST or 0) + int(COUNT))
LR = 4e-3
"""Large enough that two steps move most elements of every bf16 matrix."""


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    forked = import_module("vime_vllm.forked")
    place = tmp_path_factory.mktemp("first") / "model"
    config, _ = load_run(write_run(random_structure(0).write(place), "bf16", DENSE_V1.id))
    alignment = Alignment(DENSE_V1, "cpu", "", "vime_vllm.aligned.model:AlignedDecoder")
    with exactly({}), forked.forked_engines(config, REPRODUCIBLE, alignment):
        yield


def align(structure: RandomStructure, place: Path, plant: Callable[[Sides], object] = lambda _: None) -> Verdict:
    """The verdict on both sides of one structure.

    Raises:
        ConfigError, PolicyError: a side does not build it.
    """
    model = structure.write(place)
    config, plugins = load_run(write_run(model, structure.dtype, DENSE_V1.id, sampling=structure.sampling))
    config = with_learning_rate(config, LR)
    with open_sides(ready_parts(config, checked_policy(config, plugins), plugins)) as sides:
        plant(sides)
        requests = mixed_requests(config, structure.config["vocab_size"])
        return verify_align(sides, AlignOptions(updates=2), requests=requests)


@pytest.mark.parametrize("seeds", [SEEDS, pytest.param(range(1000, 1300), marks=pytest.mark.long)], ids=["few", "many"])
def test_log_probs_are_equal_on_random_structures(
    seeds: range, engines: None, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    verdicts: dict[int, Verdict] = {}
    refused: dict[int, str] = {}
    for seed in seeds:
        try:
            verdicts[seed] = align(random_structure(seed), tmp_path / str(seed))
        except (ConfigError, PolicyError) as error:
            refused[seed] = f"{error.code} {error.message}"
    tokens = sum(verdict.coverage.tokens for verdict in verdicts.values())
    unequal = sum(verdict.unequal for verdict in verdicts.values())
    counts = f"{len(verdicts)} structures, {tokens} tokens, {unequal} unequal; {len(refused)} refused"
    named = [f"refused: {random_structure(seed)}\n  {why}" for seed, why in refused.items()]
    record_property("summary", "\n".join([counts, *named]))
    wrong = [f"{random_structure(seed)}\n  {v.sentence}" for seed, v in verdicts.items() if v.exit_code]
    assert not wrong, "\n".join(wrong)
    assert len(refused) <= 0.05 * len(seeds)
    assert tokens > 100 * len(verdicts)


FAULTS: dict[str, Any] = {
    "swiglu": lambda sides: sides.rollout.call("vime_vllm.aligned.testing:swap_operation", "swiglu"),
    "linear": lambda sides: sides.rollout.call("vime_vllm.aligned.testing:swap_operation", "linear"),
    "temperature": lambda sides: sides.rollout.call("live_faults:heat", 1.01),
    "top_k": lambda sides: sides.rollout.call("live_faults:keep_more", 5),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault: str, engines: None, tmp_path: Path) -> None:
    structures = map(random_structure, range(SEEDS[0] + 1, SEEDS[0] + 200))
    cut = next(one for one in structures if one.sampling.get("top_k") and one.sampling["temperature"])
    verdict = align(cut, tmp_path / "model", FAULTS[fault])
    assert verdict.exit_code == 1, verdict.sentence
    assert verdict.unequal > 0
