from __future__ import annotations

import json
import random
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from vime_core.errors import RecordError
from vime_megatron.testing import PPO, Observed, random_sequences, run_config, snapshot, unequal

SEQUENCES = random_sequences(((5, 12), (1, 20), (16, 3)))


def step(trainer: Any) -> Any:
    return trainer.train_step([SEQUENCES[:2], SEQUENCES[2:]], PPO, Observed())


def state(trainer: Any) -> dict[str, Tensor]:
    return {**snapshot(trainer.weights()), **snapshot(trainer.optimizer_state())}


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_resumed_run_equals_one_that_never_stopped(
    dtype: str, llama: Path, tmp_path: Path, open_at: Callable[..., Any]
) -> None:
    config = run_config(dtype=dtype, warmup_steps=3)
    trainer = open_at(llama, config)
    step(trainer)
    trainer.save(tmp_path / "at-1")
    drawn, results = draw(), [step(trainer).loss for _ in range(2)]
    wanted = state(trainer)
    torch.manual_seed(999)
    random.seed(999)
    np.random.seed(999)
    resumed = open_at(llama, config)
    resumed.load(tmp_path / "at-1")
    assert draw() == drawn
    assert [step(resumed).loss for _ in range(2)] == results
    assert unequal(wanted, state(resumed)) == []
    fresh = open_at(llama, config)
    for _ in range(2):
        step(fresh)
    assert len(unequal(wanted, state(fresh))) > 50


def test_results_after_loading_are_the_same_numbers(llama: Path, tmp_path: Path, open_at: Callable[..., Any]) -> None:
    config = run_config(dtype="bf16", warmup_steps=5)
    trainer = open_at(llama, config)
    step(trainer)
    trainer.save(tmp_path / "at-1")
    first = step(trainer)
    trainer.load(tmp_path / "at-1")  # into a trainer that has moved on
    second = step(trainer)
    assert (first.loss, first.grad_norm, first.learning_rate) == (second.loss, second.grad_norm, second.learning_rate)
    assert all(np.array_equal(a, b) for a, b in zip(first.log_probs, second.log_probs, strict=True))


def test_a_trainer_that_never_stepped_can_be_saved(llama: Path, tmp_path: Path, open_at: Callable[..., Any]) -> None:
    trainer = open_at(llama)
    wanted = state(trainer)
    trainer.save(tmp_path / "at-0")
    step(trainer)
    after = state(trainer)
    trainer.load(tmp_path / "at-0")
    assert unequal(wanted, state(trainer)) == []
    step(trainer)
    assert unequal(after, state(trainer)) == []


@pytest.fixture
def saved(llama: Path, tmp_path: Path, open_at: Callable[..., Any]) -> Path:
    trainer = open_at(llama)
    step(trainer)
    trainer.save(tmp_path / "saved")
    return tmp_path / "saved"


def damage(saved: Path, how: str) -> None:
    marker, tensors = saved / "trainer.json", saved / "torch_dist"
    largest = max(tensors.iterdir(), key=lambda file: file.stat().st_size)
    if how == "no marker":
        marker.unlink()
    elif how == "marker is no JSON":
        marker.write_text("{")
    elif how == "other format":
        marker.write_text(json.dumps({**json.loads(marker.read_text()), "format": "vime-megatron-checkpoint/0"}))
    elif how == "truncated":
        largest.write_bytes(largest.read_bytes()[:-7])
    elif how == "one bit":
        content = bytearray(largest.read_bytes())
        content[len(content) // 2] ^= 1
        largest.write_bytes(content)
    elif how == "file missing":
        largest.unlink()
    elif how == "absent":
        shutil.rmtree(saved)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("no marker", "no complete checkpoint"),
        ("absent", "no complete checkpoint"),
        ("marker is no JSON", "damaged trainer.json"),
        ("other format", "format 'vime-megatron-checkpoint/0'"),
        ("truncated", r"is damaged: torch_dist/.*\.distcp"),
        ("one bit", r"is damaged: torch_dist/.*\.distcp"),
        ("file missing", r"does not hold the files .*\.distcp"),
    ],
)
def test_a_damaged_checkpoint_is_refused_and_changes_nothing(
    how: str, message: str, saved: Path, llama: Path, open_at: Callable[..., Any]
) -> None:
    damage(saved, how)
    trainer = open_at(llama)
    before = state(trainer)
    with pytest.raises(RecordError, match=message):
        trainer.load(saved)
    assert unequal(before, state(trainer)) == []


def test_the_undamaged_one_loads(saved: Path, llama: Path, open_at: Callable[..., Any]) -> None:
    trainer = open_at(llama)
    before = state(trainer)
    trainer.load(saved)
    assert len(unequal(before, state(trainer))) > 50


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "bf16"}, "its dtype is 'fp32', this trainer's is 'bf16'"),
        ({"lr": 2e-3}, "its optimizer is .*'lr': 0.001"),
    ],
)
def test_a_checkpoint_of_other_settings_is_refused(
    change: dict[str, Any], message: str, saved: Path, llama: Path, open_at: Callable[..., Any]
) -> None:
    with pytest.raises(RecordError, match=message):
        open_at(llama, run_config(**change)).load(saved)


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [("qwen2", {}, "its model_type is 'llama'"), ("llama", {"num_hidden_layers": 1}, "its parameters is")],
)
def test_a_checkpoint_of_another_model_is_refused(
    model_type: str,
    changes: dict[str, Any],
    message: str,
    saved: Path,
    save_hf: Callable[..., tuple[Any, Path]],
    open_at: Callable[..., Any],
) -> None:
    _, place = save_hf(model_type, tie_word_embeddings=True, **changes)
    with pytest.raises(RecordError, match=message):
        open_at(place).load(saved)


def test_nothing_is_overwritten(saved: Path, llama: Path, open_at: Callable[..., Any]) -> None:
    content = {file: file.read_bytes() for file in saved.rglob("*") if file.is_file()}
    with pytest.raises(RecordError, match="is not empty"):
        open_at(llama).save(saved)
    assert content == {file: file.read_bytes() for file in saved.rglob("*") if file.is_file()}


@pytest.fixture
def little_space() -> Iterator[None]:
    """No file may grow beyond 100 kB: writes fail as they do on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("little_space")
def test_a_full_disk_is_one_error_and_leaves_no_marker(
    llama: Path, tmp_path: Path, open_at: Callable[..., Any]
) -> None:
    trainer = open_at(llama)
    before = state(trainer)
    with pytest.raises(RecordError, match=r"cannot be written: .* MiB are free"):
        trainer.save(tmp_path / "full")
    assert not (tmp_path / "full" / "trainer.json").exists()
    assert unequal(before, state(trainer)) == []
    step(trainer)
