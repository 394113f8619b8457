"""The aligned backward: against fp64, against itself, and what it leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from vime_core.rl.losses import TokenBatch, TokenLoss
from vime_core.types import TrainSequence
from vime_megatron.mapping import to_megatron
from vime_megatron.model import DTYPES
from vime_megatron.testing import PPO, Observed, hf_log_probs, random_sequences, run_config, snapshot, unequal

LENGTHS = ((5, 12), (1, 20), (16, 3), (9, 17), (40, 60))
BOUNDS = {"fp32": 5e-6, "bf16": 4e-2}
"""Of each tensor's relative error in the Euclidean norm; the largest seen were 1.2e-6 and 1.9e-2."""


def policy_gradient(batch: TokenBatch) -> TokenLoss:
    return TokenLoss(-batch.advantages * batch.log_probs, {})


def fp64_gradients(model: Any, dtype: str, sequences: list[TrainSequence]) -> dict[str, Tensor]:
    """transformers and autograd in fp64, on weights that were rounded to the training dtype."""
    model = model.to(DTYPES[dtype]).double()
    for s in sequences:
        weights = torch.from_numpy(s.weights).double() * torch.from_numpy(s.advantages).double()
        (-(weights * hf_log_probs(model, s, 0.7)).sum()).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def errors(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> dict[str, float]:
    return {n: float((ours[n].double() - g).norm() / g.norm()) for n, g in theirs.items()}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("model_type", "tied"), [("qwen2", True), ("qwen3", True), ("llama", False)])
def test_gradients_are_within_a_bound_of_fp64(
    model_type: str, tied: bool, dtype: str, save_hf: Callable[..., tuple[Any, Path]], open_aligned: Callable[..., Any]
) -> None:
    model, place = save_hf(model_type, tie_word_embeddings=tied)
    sequences = random_sequences(LENGTHS)
    trainer = open_aligned(place, run_config(0.7, dtype=dtype))
    ours = trainer.gradients([sequences[:2], sequences[2:]], policy_gradient)
    theirs = fp64_gradients(model, dtype, sequences)
    assert set(ours) == set(theirs)
    assert {g.dtype for g in ours.values()} == {torch.float32}
    found = errors(ours, theirs)
    assert max(found.values()) < BOUNDS[dtype], found
    without = trainer.gradients([sequences[:2], sequences[2:4]], policy_gradient)
    assert min(errors(without, theirs).values()) > BOUNDS[dtype]  # a bound that a missing sequence exceeds


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "llama"])
def test_gradients_repeat_with_and_without_recomputation(
    model_type: str, dtype: str, save_hf: Callable[..., tuple[Any, Path]], open_aligned: Callable[..., Any]
) -> None:
    _, place = save_hf(model_type)
    trainer = open_aligned(place, run_config(dtype=dtype, threads=2))
    sequences = random_sequences(LENGTHS)
    microbatches = [sequences[:2], sequences[2:]]
    before = {**snapshot(trainer.weights()), **snapshot(trainer.optimizer_state())}
    first = trainer.gradients(microbatches, PPO)
    assert unequal(first, trainer.gradients(microbatches, PPO)) == []
    assert unequal(first, trainer.gradients(microbatches, PPO, recompute=True)) == []
    assert unequal(before, {**snapshot(trainer.weights()), **snapshot(trainer.optimizer_state())}) == []
    observed = Observed()
    trainer.train_step(microbatches, PPO, observed)
    named = dict(to_megatron(first, trainer._blueprint.rules))
    assert unequal(named, observed.seen) == []
    moved = trainer.gradients(microbatches, PPO)
    assert len(unequal(first, moved)) == len(first)


def test_recomputation_really_runs_each_layer_again(llama: Path, open_aligned: Callable[..., Any]) -> None:
    trainer = open_aligned(llama)
    calls: list[int] = []
    for number, layer in enumerate(trainer._model.decoder.layers):
        layer.mlp.register_forward_pre_hook(lambda *_, number=number: calls.append(number))
    (sequence,) = random_sequences(LENGTHS[:1])
    trainer.gradients([[sequence]], PPO)
    assert calls == [0, 1]
    calls.clear()
    trainer.gradients([[sequence]], PPO, recompute=True)
    assert calls == [0, 1, 1, 0]


def test_a_recomputation_that_differs_is_noticed(llama: Path, open_aligned: Callable[..., Any]) -> None:
    trainer = open_aligned(llama)
    (sequence,) = random_sequences(LENGTHS[:1])
    expected = trainer.gradients([[sequence]], PPO)
    norm, seen = trainer._model.decoder.layers[0].input_layernorm, [0]

    def second_time(module: Any, _: Any) -> None:
        seen[0] += 1
        module.eps = 1e-6 if seen[0] == 1 else 1e-3

    norm.register_forward_pre_hook(second_time)
    changed = trainer.gradients([[sequence]], PPO, recompute=True)
    assert len(unequal(expected, changed)) > 5


def test_a_failed_pass_leaves_no_gradient_behind(llama: Path, open_aligned: Callable[..., Any]) -> None:
    trainer = open_aligned(llama)
    sequences = random_sequences(LENGTHS)
    expected = trainer.gradients([sequences], PPO)

    def fails(batch: TokenBatch) -> TokenLoss:
        if len(batch.log_probs) == 12:
            return PPO(batch)
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        trainer.gradients([sequences[:1], sequences[1:]], fails)
    assert not any(gradient.any() for _, gradient in trainer._optimization.gradients())
    assert unequal(expected, trainer.gradients([sequences], PPO)) == []


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_steps_repeat_and_survive_a_checkpoint(
    dtype: str, llama: Path, tmp_path: Path, open_aligned: Callable[..., Any]
) -> None:
    sequences = random_sequences(LENGTHS)
    microbatches = [sequences[:2], sequences[2:]]
    config = run_config(dtype=dtype)
    trainer = open_aligned(llama, config)
    trainer.train_step(microbatches, PPO, Observed())
    trainer.save(tmp_path)
    after = state(trainer.train_step(microbatches, PPO, Observed()), trainer)
    resumed = open_aligned(llama, config)
    resumed.load(tmp_path)
    assert unequal(after, state(resumed.train_step(microbatches, PPO, Observed()), resumed)) == []
    fresh = open_aligned(llama, config)
    fresh.train_step(microbatches, PPO, Observed())
    changed = [sequences[:1], sequences[1:]]
    assert len(unequal(after, state(fresh.train_step(changed, PPO, Observed()), fresh))) > 20


def state(result: Any, trainer: Any) -> dict[str, Tensor]:
    scalars = torch.tensor([result.loss, result.grad_norm], dtype=torch.float64)
    log_probs = torch.cat([torch.from_numpy(part) for part in result.log_probs])
    kept = {**snapshot(trainer.weights()), **snapshot(trainer.optimizer_state())}
    return {"scalars": scalars, "log_probs": log_probs, **kept}


def test_threads_change_no_bit_of_a_gradient(
    save_hf: Callable[..., tuple[Any, Path]], open_aligned: Callable[..., Any]
) -> None:
    """The weight gradient too is the contract's operation, not a matrix product of torch's."""
    _, place = save_hf("qwen2")
    sequences = random_sequences(LENGTHS)
    found = [
        open_aligned(place, run_config(0.7, dtype="bf16", threads=threads)).gradients([sequences], policy_gradient)
        for threads in (1, 3)
    ]
    assert unequal(*found) == []
