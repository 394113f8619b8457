"""The aligned forward against one that shares nothing with it but the operations, and against transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from vime_core.alignment import Alignment
from vime_core.alignment.taps import LAYER_TAPS
from vime_core.numerics import Operations, load_provider
from vime_core.types import TrainSequence
from vime_megatron.aligned.testing import WholeSequence, random_shape, unequal_bits
from vime_megatron.model import DTYPES
from vime_megatron.testing import PPO, Observed, hf_log_probs, random_sequences, run_config

LENGTHS = ((5, 12), (1, 90), (1, 1), (20, 1), (9, 40), (60, 17))
STRUCTURES = ("qwen2", "qwen3", "llama")


def joined(parts: Any) -> Tensor:
    return torch.cat([torch.as_tensor(part) for part in parts])


def packings(sequences: list[TrainSequence]) -> list[list[list[TrainSequence]]]:
    """All together, each alone, and in pieces in the opposite order."""
    backwards = sequences[::-1]
    return [[sequences], [[s] for s in sequences], [backwards[:2], backwards[2:5], backwards[5:]]]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("model_type", STRUCTURES)
def test_every_packing_has_the_bits_of_a_whole_sequence_forward(
    model_type: str,
    dtype: str,
    seed: int,
    operations: Operations,
    save_hf: Callable[..., tuple[Any, Path]],
    open_aligned: Callable[..., Any],
) -> None:
    shape = random_shape(seed + 10 * STRUCTURES.index(model_type))
    temperature = (1.0, 0.7, 0.0, 1.3)[seed]
    _, place = save_hf(model_type, seed, **shape)
    reference = WholeSequence.open(operations, place, DTYPES[dtype])
    sequences = random_sequences(LENGTHS, seed, shape["vocab_size"])
    expected = {s.key: reference.log_probs(s, temperature) for s in sequences}
    trainer = open_aligned(place, run_config(temperature, dtype=dtype))
    for packing in packings(sequences):
        order = [s for microbatch in packing for s in microbatch]
        found = joined(trainer.log_probs(packing))
        assert unequal_bits(found, joined(expected[s.key] for s in order)) == 0
    assert joined(expected.values()).std() > 0.3  # else any two would agree
    assert len(joined(expected.values())) == sum(response for _, response in LENGTHS)


@pytest.mark.parametrize("model_type", STRUCTURES)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_fp32_agrees_with_transformers(
    model_type: str, temperature: float, save_hf: Callable[..., tuple[Any, Path]], open_aligned: Callable[..., Any]
) -> None:
    model, place = save_hf(model_type, tie_word_embeddings=True)
    sequences = random_sequences(LENGTHS)
    ours = open_aligned(place, run_config(temperature)).log_probs([sequences])
    with torch.no_grad():
        theirs = [hf_log_probs(model, sequence, temperature).numpy() for sequence in sequences]
    assert max(np.abs(a - b).max() for a, b in zip(ours, theirs, strict=True)) < 2e-5
    other = open_aligned(place, run_config(temperature + 0.01)).log_probs([sequences])
    assert max(np.abs(a - b).max() for a, b in zip(other, theirs, strict=True)) > 1e-3


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_training_forward_has_the_bits_of_scoring(
    dtype: str, llama: Path, open_aligned: Callable[..., Any]
) -> None:
    trainer = open_aligned(llama, run_config(0.7, dtype=dtype))
    sequences = random_sequences(LENGTHS)
    scored = joined(trainer.log_probs([sequences[:1], sequences[1:]]))
    trained = joined(trainer.train_step([sequences[:4], sequences[4:]], PPO, Observed()).log_probs)
    assert unequal_bits(scored, trained) == 0
    again = joined(trainer.log_probs([sequences]))
    assert unequal_bits(scored, again) > len(scored) // 2  # the step moved the weights


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_both_providers_and_any_threads_give_the_same_bits(
    dtype: str, llama: Path, reference_provider: Alignment, open_aligned: Callable[..., Any]
) -> None:
    sequences = random_sequences(LENGTHS[:1] + LENGTHS[3:5])
    trainers = (
        lambda: open_aligned(llama, run_config(0.7, dtype=dtype)),
        lambda: open_aligned(llama, run_config(0.7, dtype=dtype, threads=2)),
        lambda: open_aligned(llama, run_config(0.7, dtype=dtype), reference_provider),
    )
    cpu, threaded, reference = (joined(make().log_probs([sequences])) for make in trainers)
    assert unequal_bits(cpu, threaded) == 0
    assert unequal_bits(cpu, reference) == 0


@pytest.mark.parametrize("model_type", STRUCTURES)
def test_taps_are_what_each_operation_gave(
    model_type: str,
    operations: Operations,
    save_hf: Callable[..., tuple[Any, Path]],
    open_aligned: Callable[..., Any],
) -> None:
    _, place = save_hf(model_type)
    (sequence,) = random_sequences([(9, 14)])
    expected: dict[str, Tensor] = {}
    reference = WholeSequence.open(operations, place, torch.bfloat16)
    reference.log_probs(sequence, 1.0, lambda name, rows: expected.__setitem__(name, rows))
    taps = open_aligned(place, run_config(dtype="bf16")).record_taps(sequence)
    assert list(taps) == list(expected)
    assert [name.removeprefix("layers.1.") for name in taps if name.startswith("layers.1.")] == list(LAYER_TAPS)
    for name, (positions, rows) in taps.items():
        assert unequal_bits(rows, expected[name]) == 0, name
        first = sequence.response_start - 1 if name == "logits" else 0
        assert positions.tolist() == list(range(first, len(sequence.tokens) - 1))


def test_nothing_is_recorded_in_between(llama: Path, open_aligned: Callable[..., Any]) -> None:
    trainer = open_aligned(llama)
    first, second = random_sequences([(9, 14), (3, 5)])
    short = trainer.record_taps(second)
    trainer.log_probs([[first, second]])
    again = trainer.record_taps(second)
    assert list(short) == list(again)
    assert all(unequal_bits(short[name][1], again[name][1]) == 0 for name in short)


def test_an_odd_neighbour_changes_nothing(llama: Path, open_aligned: Callable[..., Any]) -> None:
    """The neighbour is huge in every activation: a sum over rows that leaked would not go unseen."""
    trainer = open_aligned(llama, run_config(dtype="bf16"))
    one, other = random_sequences([(9, 14), (30, 80)])
    alone = joined(trainer.log_probs([[one]]))
    with torch.no_grad():
        embedding = trainer._model.embedding.word_embeddings.weight
        unused = next(t for t in range(96) if t not in one.tokens)
        embedding[unused] *= 1e4
    from dataclasses import replace

    beside = replace(other, tokens=(unused,) * len(other.tokens))
    together = trainer.log_probs([[beside, one, beside]])[1]
    tied = joined(trainer.log_probs([[one]]))
    assert unequal_bits(tied, torch.as_tensor(together)) == 0
    assert unequal_bits(tied, alone) > 0  # the output layer is tied: its row grew too


def test_the_provider_can_be_loaded_by_name() -> None:
    assert load_provider("cpu").digest == load_provider("cpu").digest != load_provider("reference").digest
