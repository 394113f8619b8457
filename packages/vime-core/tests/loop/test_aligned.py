"""A run under a contract stops at the first log-prob that differs, and compares bits."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vime_core.backends import AlignedTrainer, DrawingTrainer, Trainer
from vime_core.config.load import load_config
from vime_core.errors import ConfigError, ContractViolation
from vime_core.loop.aligned import require_aligned, require_drawn, require_draws
from vime_core.types import Drawn, KeptTokens, Sample


def sample(index: int, *log_probs: float) -> Sample:
    values = np.array(log_probs, dtype=np.float32)
    tokens = tuple(range(len(values)))
    return Sample(3, index, 0, (1,), tokens, values, (True,) * len(values), 0.0, 0, "stop", index)


def test_equal_bits_pass() -> None:
    samples = [sample(0, -1.0, -2.0), sample(1, -0.5)]
    require_aligned("dense/v1", "step 0", samples, [s.rollout_log_probs.copy() for s in samples])


def test_one_ulp_is_named() -> None:
    samples = [sample(0, -1.0, -2.0), sample(1, -0.5)]
    train = [s.rollout_log_probs.copy() for s in samples]
    train[1][0] = np.nextafter(train[1][0], np.float32(0))
    with pytest.raises(ContractViolation, match=r"step 4: 1 of 3 log-probs differ, first in sample \(3, 1\).*token 0"):
        require_aligned("dense/v1", "step 4", samples, train)
    require_aligned("", "step 4", samples, train)


@pytest.mark.parametrize(("first", "second"), [(float("nan"), float("nan")), (0.0, -0.0), (-1.0, float("nan"))])
def test_nan_and_the_sign_of_zero_differ(first: float, second: float) -> None:
    with pytest.raises(ContractViolation, match="1 of 1 log-probs differ"):
        require_aligned("dense/v1", "step 0", [sample(0, first)], [np.array([second], dtype=np.float32)])


def test_nothing_compared_is_no_pass() -> None:
    with pytest.raises(ContractViolation, match="nothing could be compared"):
        require_aligned("dense/v1", "step 0", [], [])


def drawn(*tokens: int, kept: KeptTokens = KeptTokens()) -> Drawn:  # noqa: B008 (frozen)
    return Drawn(tokens, np.zeros(len(tokens), dtype=np.float32), kept)


def test_equal_draws_pass() -> None:
    require_drawn("dense/v1", "step 0", [sample(0, -1.0, -2.0), sample(1, -0.5)], [drawn(0, 1), drawn(0)])


@pytest.mark.parametrize(
    ("again", "words"),
    [
        (drawn(0, 7), "token 1: the engine returned 1, and the trainer draws 7 from equal logits"),
        (drawn(0), "the engine returned 2 tokens, and the trainer draws 1"),
        (drawn(0, 1, 2), "the engine returned 2 tokens, and the trainer draws 3"),
        (drawn(0, 1, kept=KeptTokens((0, 1, 5), (1, 2))), "top-k and top-p leave other tokens"),
    ],
)
def test_another_draw_of_the_last_sample_is_named(again: Drawn, words: str) -> None:
    with pytest.raises(ContractViolation, match=rf"step 0: sample \(3, 1\) \(prompt, sample\), {words}"):
        require_drawn("dense/v1", "step 0", [sample(0, -0.5), sample(1, -1.0, -2.0)], [drawn(0), again])


@pytest.mark.parametrize(("samples", "again"), [([], []), ([sample(0)], [drawn()])])
def test_nothing_drawn_again_is_no_pass(samples: list[Sample], again: list[Drawn]) -> None:
    with pytest.raises(ContractViolation, match="nothing could be drawn again"):
        require_drawn("dense/v1", "step 0", samples, again)


def test_evaluations_that_nothing_could_hold_to_the_contract_are_refused() -> None:
    methods = [n for kind in (Trainer, AlignedTrainer, DrawingTrainer) for n in vars(kind) if not n.startswith("_")]
    drawing: Any = SimpleNamespace(**dict.fromkeys(methods, print))
    other: Any = SimpleNamespace(**dict.fromkeys(set(methods) - {"draw_again"}, print))
    aligned = Path(__file__).parents[4] / "configs" / "aligned-smoke.toml"
    config = load_config([aligned], ["evaluation.every=5"])[0]
    require_draws(config, drawing)
    with pytest.raises(ConfigError, match=r"evaluation\.every = 5 under alignment\.contract = 'dense/v1'.*draw_again"):
        require_draws(config, other)
    require_draws(load_config([aligned], [])[0], other)
    require_draws(load_config([aligned], ["evaluation.every=5", "alignment.contract=''"])[0], other)
