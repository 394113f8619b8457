"""The parts of the loop that compute: weights compared, minibatches, order, seeds, mismatch, checkpoints."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vime_core.backends import Trainer
from vime_core.config.load import load_config
from vime_core.errors import BackendError, ConfigError, ContractViolation, RecordError
from vime_core.loop.algorithm import Algorithm, ConfiguredLoss, in_order_of, load_algorithm, require_entropy
from vime_core.loop.checkpoint import (
    LoopState,
    checkpoint_directory,
    last_checkpoint,
    read_checkpoint,
    write_checkpoint,
)
from vime_core.loop.metrics import ABS_DIFF, mismatch, step_metrics
from vime_core.loop.prompts import require_distinct_seeds
from vime_core.loop.timing import PhaseTimer
from vime_core.loop.weights import require_equal_weights
from vime_core.rl import advantages
from vime_core.rl.losses import PpoClipOptions, ppo_clip
from vime_core.sinks.console import warnings
from vime_core.types import Sample, SampleRequest, TrainStepResult

ROOT = Path(__file__).parents[4]


def sample(prompt: int, index: int, length: int = 3, log_prob: float = -1.0) -> Sample:
    return Sample(
        prompt_index=prompt,
        sample_index=index,
        dataset_index=prompt,
        prompt_tokens=(1, 2),
        response_tokens=tuple(range(length)),
        rollout_log_probs=np.full(length, log_prob, dtype=np.float32),
        loss_mask=(True,) * length,
        reward=0.5,
        weight_version=0,
        finish_reason="stop",
        seed=prompt * 100 + index,
    )


def algorithm(updates: int, budget: int = 16, group: int = 2) -> Algorithm:
    config: Any = SimpleNamespace(
        algorithm=SimpleNamespace(updates_per_rollout=updates, reduction="token"),
        sampling=SimpleNamespace(samples_per_prompt=group, max_tokens=8),
        trainer=SimpleNamespace(token_budget=budget),
    )
    return Algorithm(config, estimate=None, estimate_options=None, loss=None)  # type: ignore[arg-type]


def test_an_entropy_bonus_needs_a_trainer_that_gives_it_and_no_contract() -> None:
    loss = ConfiguredLoss(ppo_clip, PpoClipOptions(entropy_coefficient=0.01))
    wanting = replace(algorithm(1), loss=loss)
    wanting.config.algorithm.loss, wanting.config.trainer.backend = "ppo-clip", "plain"
    names = dict.fromkeys(("gives_entropy", *(name for name in vars(Trainer) if not name.startswith("_"))), print)
    require_entropy(wanting, SimpleNamespace(**names))  # type: ignore[arg-type]
    require_entropy(replace(wanting, loss=ConfiguredLoss(ppo_clip, PpoClipOptions())), SimpleNamespace())  # type: ignore[arg-type]
    del names["gives_entropy"]
    with pytest.raises(ConfigError, match=r"trainer\.backend = 'plain' gives no entropy"):
        require_entropy(wanting, SimpleNamespace(**names))  # type: ignore[arg-type]
    config, plugins = load_config(
        [ROOT / "configs" / "aligned-smoke.toml"], ["algorithm.ppo-clip.entropy_coefficient=0.01"]
    )
    with pytest.raises(ConfigError, match="'dense/v1' defines no entropy"):
        load_algorithm(config, plugins)


def test_an_estimator_that_takes_no_absent_responses_is_refused_with_drop(monkeypatch: pytest.MonkeyPatch) -> None:
    config, plugins = load_config([ROOT / "configs" / "smoke.toml"], ["algorithm.overlong=drop"])
    assert load_algorithm(config, plugins).advantages([1.0, 0.0, 0.5, 9.0], [True, True, True, False]).tolist() == [
        pytest.approx(1.0, abs=1e-5),
        pytest.approx(-1.0, abs=1e-5),
        0.0,
        0.0,
    ]
    grpo = advantages.grpo
    monkeypatch.setattr(advantages, "grpo", lambda rewards, options: grpo(rewards, options))
    with pytest.raises(ConfigError, match=r"algorithm\.advantage = 'grpo' takes none"):
        load_algorithm(config, plugins)


DIGESTS = {"a": "11", "b": "22"}


def test_equal_weights_pass() -> None:
    require_equal_weights(DIGESTS, dict(DIGESTS), 3)


@pytest.mark.parametrize(
    ("trainer", "rollout", "part"),
    [
        (DIGESTS, {**DIGESTS, "b": "23"}, "'b' differs .*1 of 2 tensors differ"),
        (DIGESTS, {"a": "11"}, "'b' is missing on the side of the rollout engine"),
        ({"a": "11"}, DIGESTS, "'b' is missing on the side of the trainer"),
        ({}, {}, "nothing could be compared"),
    ],
)
def test_unequal_weights_stop_the_run(trainer: dict[str, str], rollout: dict[str, str], part: str) -> None:
    with pytest.raises(ContractViolation, match=part) as caught:
        require_equal_weights(trainer, rollout, 7)
    assert "weight version 7" in caught.value.message


@given(prompts=st.integers(1, 12), updates=st.integers(1, 5))
def test_minibatches_take_every_sample_once_in_order_and_whole_groups(prompts: int, updates: int) -> None:
    samples = [sample(p, s) for p in range(prompts) for s in range(2)]
    parts = algorithm(updates).minibatches(samples, np.zeros(len(samples), dtype=np.float32))
    assert [s.key for part in parts for s in part] == [s.key for s in samples]
    assert all(len(part) % 2 == 0 for part in parts)
    assert len(parts) == min(updates, prompts)
    for part in parts:
        assert math.isclose(sum(float(s.weights.sum()) for s in part), 1.0, rel_tol=1e-6)


@given(st.lists(st.integers(1, 14), min_size=1, max_size=12))
def test_results_come_back_in_sample_order_whatever_the_packing(lengths: list[int]) -> None:
    samples = [sample(i, 0, length) for i, length in enumerate(lengths)]
    (sequences,) = algorithm(1, group=1).minibatches(samples, np.zeros(len(samples), dtype=np.float32))
    microbatches = algorithm(1, group=1).microbatches(sequences)
    returned = [np.full(s.response_length, s.key[0], dtype=np.float32) for m in microbatches for s in m]
    ordered = in_order_of(sequences, microbatches, returned)
    assert [int(values[0]) for values in ordered] == list(range(len(lengths)))
    with pytest.raises(BackendError, match="log-probs of"):
        in_order_of(sequences, microbatches, returned[1:])
    with pytest.raises(BackendError, match="of other lengths"):
        in_order_of(sequences, microbatches, [*returned[:-1], np.zeros(99, dtype=np.float32)])


def request(prompt: int, index: int, seed: int) -> SampleRequest:
    return SampleRequest(prompt, index, (1,), seed, max_tokens=4)


def test_equal_seeds_of_two_prompts_stop_the_run() -> None:
    require_distinct_seeds([request(0, 0, 5), request(0, 1, 6)])
    with pytest.raises(ContractViolation, match=r"\(0, 1\) and \(1, 0\) .* same seed 6"):
        require_distinct_seeds([request(0, 0, 5), request(0, 1, 6), request(1, 0, 6)])


def test_mismatch_counts_bits_and_measures_distance() -> None:
    samples = [sample(0, 0), sample(0, 1)]
    train = [s.rollout_log_probs.copy() for s in samples]
    assert mismatch(samples, train)[ABS_DIFF] == 0.0
    train[1][2] = np.nextafter(np.float32(-1.0), np.float32(0.0))
    found = mismatch(samples, train)
    assert found[f"{ABS_DIFF}/unequal"] == 1 / 6
    assert found[f"{ABS_DIFF}/max"] == 2.0**-24


@pytest.mark.parametrize("side", ["rollout engine", "trainer"])
def test_a_log_prob_that_is_no_number_stops_the_run(side: str) -> None:
    broken, whole = sample(0, 0, log_prob=math.nan), sample(0, 0)
    rollout, train = (broken, whole) if side == "rollout engine" else (whole, broken)
    with pytest.raises(BackendError, match=f"3 of 3 log-probs of the {side} are not finite"):
        mismatch([rollout], [train.rollout_log_probs])


def test_a_checkpoint_has_its_name_only_when_it_is_whole(tmp_path: Path) -> None:
    state = LoopState(
        run_id="r",
        next_step=3,
        weight_version=3,
        run_seed=1,
        weights_root="a",
        optimizer_root="b",
        steps_digest="c",
        settings={"trainer.lr": 1e-6},
    )

    def save(directory: Path) -> None:
        (directory / "weights").write_text("w")

    def fail(directory: Path) -> None:
        (directory / "weights").write_text("w")
        raise OSError("planted")

    with pytest.raises(RecordError, match="planted"):
        write_checkpoint(SimpleNamespace(save=fail), tmp_path, state)  # type: ignore[arg-type]
    assert not checkpoint_directory(tmp_path, 3).exists()
    written = write_checkpoint(SimpleNamespace(save=save), tmp_path, state)  # type: ignore[arg-type]
    assert written == checkpoint_directory(tmp_path, 3)
    assert (written / "trainer" / "weights").read_text() == "w"
    assert [path.name for path in written.parent.iterdir()] == [written.name]
    assert read_checkpoint(written) == state
    (written.parent / "step-²").mkdir()  # a digit to Python, and no number
    assert last_checkpoint(tmp_path) == written


def test_phases_add_up_and_move() -> None:
    timer = PhaseTimer()
    with timer("train"):
        pass
    timer.seconds["train"] = 5.0
    timer.move(2.0, source="train", target="record")
    assert timer.seconds == {"train": 3.0, "record": 2.0}


def test_what_teaches_nothing_is_counted_and_shown() -> None:
    def metrics(*rewards: float, tokens: tuple[int, ...] = (1, 2)) -> dict[str, float]:
        samples = [replace(sample(i // 2, i % 2), reward=r) for i, r in enumerate(rewards)]
        samples = [replace(s, prompt_tokens=(s.prompt_index,) if tokens == () else tokens) for s in samples]
        timer = PhaseTimer()
        timer.seconds["generate"] = 1.0
        result = TrainStepResult(0.0, 1.0, 1e-3, ())
        return step_metrics(samples, [s.rollout_log_probs for s in samples], [result], timer)

    learning = metrics(0.0, 1.0, 1.0, 1.0, tokens=())
    assert (learning["reward/flat_groups"], learning["data/repeated_prompts"]) == (0.5, 0.0)
    assert warnings(learning) == []
    (flat,) = warnings(metrics(0.0, 0.0, 1.0, 1.0, tokens=()))
    assert "the rewards of each prompt are all equal" in flat
    same, repeated = warnings(metrics(0.0, 0.0, 0.0, 0.0))
    assert "all rewards are 0" in same
    assert "1 prompts of this step came more than once" in repeated
