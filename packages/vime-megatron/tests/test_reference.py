"""The frozen second copy: it scores as the weights did when it was made, whatever is trained since."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vime_core.backends import ReferenceTrainer
from vime_core.errors import BackendError
from vime_megatron.testing import PPO, Observed, hf_log_probs, hf_model, random_sequences, run_config, snapshot, unequal

SEQUENCES = random_sequences(((5, 12), (1, 20), (16, 3)))
BATCHES = [SEQUENCES[:2], SEQUENCES[2:]]


def bits(scores: Any) -> list[bytes]:
    return [score.tobytes() for score in scores]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_reference_stays_while_the_policy_moves(
    dtype: str, llama: Path, tmp_path: Path, open_at: Callable[..., Any]
) -> None:
    trainer = open_at(llama, run_config(dtype=dtype))
    assert isinstance(trainer, ReferenceTrainer)
    first = bits(trainer.log_probs(BATCHES))
    trainer.keep_reference()
    before = snapshot(trainer.weights())
    assert bits(trainer.reference_log_probs(BATCHES)) == first
    assert unequal(before, snapshot(trainer.weights())) == []
    trainer.train_step(BATCHES, PPO, Observed())
    moved = bits(trainer.log_probs(BATCHES))
    assert moved != first
    assert bits(trainer.reference_log_probs(BATCHES)) == first
    assert bits(trainer.log_probs(BATCHES)) == moved
    trainer.save(tmp_path / "checkpoint")
    trainer.keep_reference()
    assert bits(trainer.reference_log_probs(BATCHES)) == moved
    trainer.load(tmp_path / "checkpoint")
    assert bits(trainer.reference_log_probs(BATCHES)) == first


def test_training_goes_on_in_the_trainers_own_memory(llama: Path, open_at: Callable[..., Any]) -> None:
    scoring = open_at(llama, run_config())
    scoring.keep_reference()
    for _ in range(2):
        scoring.reference_log_probs(BATCHES)
        scoring.train_step(BATCHES, PPO, Observed())
    wanted = snapshot(scoring.weights())
    plain = open_at(llama, run_config())
    for _ in range(2):
        plain.train_step(BATCHES, PPO, Observed())
    assert unequal(wanted, snapshot(plain.weights())) == []


def test_the_reference_scores_as_transformers_does(llama: Path, open_at: Callable[..., Any]) -> None:
    trainer = open_at(llama, run_config(dtype="fp32"))
    trainer.keep_reference()
    trainer.train_step(BATCHES, PPO, Observed())
    model = hf_model("llama", tie_word_embeddings=True)
    for sequence, found in zip(SEQUENCES, trainer.reference_log_probs(BATCHES), strict=True):
        np.testing.assert_allclose(found, hf_log_probs(model, sequence).detach(), atol=2e-5)


def test_without_a_reference_there_is_nothing_to_score(llama: Path, open_at: Callable[..., Any]) -> None:
    with pytest.raises(BackendError, match="none is kept"):
        open_at(llama, run_config()).reference_log_probs(BATCHES)
