from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vime_core.errors import BackendError, ConfigError
from vime_megatron.testing import hf_log_probs, random_sequences, run_config

LENGTHS = ((5, 12), (1, 30), (20, 1), (9, 17))


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_packed_log_probs_agree_with_transformers(
    model_type: str, temperature: float, save_hf: Callable[..., tuple[Any, Path]], open_at: Callable[..., Any]
) -> None:
    model, place = save_hf(model_type, tie_word_embeddings=True)
    sequences = random_sequences(LENGTHS)
    ours = open_at(place, run_config(temperature)).log_probs([sequences[:3], sequences[3:]])
    with torch.no_grad():
        theirs = [hf_log_probs(model, sequence, temperature).numpy() for sequence in sequences]
    assert [part.dtype for part in ours] == [np.float32] * 4
    assert max(np.abs(a - b).max() for a, b in zip(ours, theirs, strict=True)) < 3e-5
    assert np.concatenate(theirs).std() > 0.3  # else any two would agree
    other = open_at(place, run_config(temperature + 0.5)).log_probs([sequences])
    assert max(np.abs(a - b).max() for a, b in zip(other, theirs, strict=True)) > 0.05


@pytest.mark.parametrize(("dtype", "bound"), [("fp32", 3e-5), ("bf16", 0.1)])
def test_a_pack_gives_what_each_sequence_gives_alone(
    dtype: str, bound: float, llama: Path, open_at: Callable[..., Any]
) -> None:
    trainer = open_at(llama, run_config(dtype=dtype))
    sequences = random_sequences(LENGTHS)
    packed = trainer.log_probs([sequences])
    alone = [trainer.log_probs([[sequence]])[0] for sequence in sequences]
    assert max(np.abs(a - b).max() for a, b in zip(packed, alone, strict=True)) < bound


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_another_neighbour_changes_no_bit(dtype: str, llama: Path, open_at: Callable[..., Any]) -> None:
    trainer = open_at(llama, run_config(dtype=dtype))
    sequences = random_sequences(LENGTHS)
    changed = list(sequences)
    changed[1] = replace(changed[1], tokens=tuple((t + 1) % 96 for t in changed[1].tokens))
    first, second = trainer.log_probs([sequences]), trainer.log_probs([changed])
    same = [np.array_equal(a, b) for a, b in zip(first, second, strict=True)]
    assert same == [True, False, True, True]


def test_dtypes_differ(llama: Path, open_at: Callable[..., Any]) -> None:
    sequences = random_sequences(LENGTHS)
    single = np.concatenate(open_at(llama, run_config(dtype="fp32")).log_probs([sequences]))
    half = np.concatenate(open_at(llama, run_config(dtype="bf16")).log_probs([sequences]))
    assert 0 < np.abs(single - half).max() < 0.2


@pytest.mark.parametrize("tokens", [(5, 96, 1), (5, -1, 1), (1,) * 129])
def test_a_sequence_that_does_not_fit_the_model_is_named(
    tokens: tuple[int, ...], llama: Path, open_at: Callable[..., Any]
) -> None:
    (sequence,) = random_sequences([(1, 2)])
    with pytest.raises(BackendError, match=r"sequence \(0, 0\)"):
        open_at(llama).log_probs([[replace(sequence, tokens=tokens)]])


def test_a_context_that_exceeds_the_models_is_refused(
    save_hf: Callable[..., tuple[Any, Path]], open_at: Callable[..., Any]
) -> None:
    _, place = save_hf("llama", max_position_embeddings=64)
    with pytest.raises(ConfigError, match=r"context_length = 128 exceeds .* = 64"):
        open_at(place)
