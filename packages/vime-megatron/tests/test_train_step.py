from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from vime_core.errors import BackendError
from vime_core.loop.algorithm import ConfiguredLoss
from vime_core.rl.losses import PpoClipOptions, TokenBatch, TokenLoss, ppo_clip
from vime_core.types import TrainSequence
from vime_megatron.mapping import to_megatron
from vime_megatron.testing import (
    PPO,
    VOCABULARY,
    Observed,
    hf_log_probs,
    random_sequences,
    run_config,
    snapshot,
    unequal,
)

LENGTHS = ((5, 12), (1, 20), (16, 3), (9, 17))
SMOOTH = {"eps": 1e-2, "lr": 1e-2}
"""With a large eps Adam's update is a smooth function of the gradient, and two computations can be compared."""


class Reference:
    """The same step by transformers and torch's AdamW, one sequence after another, without packing or Megatron."""

    def __init__(self, model: Any, *, clip: float, warmup: int, decay: float) -> None:
        self.model, self.clip, self.warmup, self.updates = model, clip, warmup, 0
        matrices = [p for p in model.parameters() if p.ndim > 1]
        vectors = [p for p in model.parameters() if p.ndim == 1]
        groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
        self.adam = torch.optim.AdamW(groups, lr=SMOOTH["lr"], betas=(0.9, 0.98), eps=SMOOTH["eps"])

    def step(self, sequences: list[TrainSequence]) -> tuple[float, float, float, dict[str, Tensor]]:
        self.updates += 1
        rate = SMOOTH["lr"] * min(1.0, self.updates / self.warmup if self.warmup else 1.0)
        for group in self.adam.param_groups:
            group["lr"] = rate
        self.adam.zero_grad()
        total = 0.0
        for s in sequences:
            log_probs = hf_log_probs(self.model, s, 0.8)
            old = log_probs.detach() if s.old_log_probs is None else torch.from_numpy(s.old_log_probs).double()
            ratio, advantage = (log_probs - old).exp(), torch.from_numpy(s.advantages).double()
            surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            loss = -(torch.from_numpy(s.weights).double() * surrogate).sum()
            loss.backward()
            total += loss.item()
        gradients = {name: p.grad.clone() for name, p in self.model.named_parameters()}
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip or torch.inf))
        self.adam.step()
        return total, norm, rate, gradients


def relative(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference, in units of the reference's largest value."""
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize(
    ("model_type", "tied", "clip", "warmup", "decay"),
    [("qwen2", True, 0.05, 2, 0.1), ("llama", False, 0.0, 0, 0.0), ("qwen3", True, 1000.0, 0, 0.1)],
)
def test_two_steps_agree_with_an_independent_computation(
    model_type: str,
    tied: bool,
    clip: float,
    warmup: int,
    decay: float,
    save_hf: Callable[..., tuple[Any, Path]],
    open_at: Callable[..., Any],
) -> None:
    model, place = save_hf(model_type, tie_word_embeddings=tied)
    config = run_config(0.8, clip_grad=clip, warmup_steps=warmup, weight_decay=decay, **SMOOTH)
    trainer, reference = open_at(place, config), Reference(model, clip=clip, warmup=warmup, decay=decay)
    sequences = random_sequences(LENGTHS)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    old = [hf_log_probs(model, s, 0.8).detach().numpy().astype(np.float32) + 0.05 for s in sequences]
    for batch in (sequences, random_sequences(LENGTHS, old_log_probs=old)):
        observed = Observed()
        result = trainer.train_step([batch[:3], batch[3:]], PPO, observed)
        loss, norm, rate, gradients = reference.step(batch)
        assert result.loss == pytest.approx(loss, rel=1e-4, abs=1e-6)
        assert result.grad_norm == pytest.approx(norm, rel=1e-4)
        assert result.learning_rate == rate
        expected = dict(to_megatron(gradients, trainer._blueprint.rules))
        assert list(expected) == [rule.target for rule in trainer._blueprint.rules]
        assert set(expected) == set(observed.seen)
        assert all(tensor.dtype == torch.float32 for tensor in observed.seen.values())
        assert max(relative(observed.seen[name], expected[name]) for name in expected) < 1e-4
    updates = {name: (p.detach() - before[name]) for name, p in model.named_parameters()}
    ours = {name: tensor - before[name] for name, tensor in snapshot(trainer.weights()).items()}
    assert set(ours) == set(updates)
    assert max(relative(ours[name], updates[name]) for name in updates) < 1e-3


def test_a_wrong_optimizer_setting_is_noticed(
    save_hf: Callable[..., tuple[Any, Path]], open_at: Callable[..., Any]
) -> None:
    model, place = save_hf("llama", tie_word_embeddings=True)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = open_at(place, run_config(0.8, weight_decay=0.1, **SMOOTH))
    sequences = random_sequences(LENGTHS)
    trainer.train_step([sequences], PPO, Observed())
    Reference(model, clip=1.0, warmup=0, decay=0.0).step(sequences)
    name = "model.layers.0.mlp.up_proj.weight"
    updated = dict(model.named_parameters())[name].detach() - before[name]
    assert relative(snapshot(trainer.weights())[name] - before[name], updated) > 1e-2


@pytest.mark.parametrize(("dtype", "threads"), [("fp32", 1), ("bf16", 1), ("bf16", 2)])
def test_the_same_step_twice_gives_the_same_bits(
    dtype: str, threads: int, llama: Path, open_at: Callable[..., Any]
) -> None:
    config = run_config(dtype=dtype, threads=threads)
    outcomes = [outcome(open_at(llama, config), advantage=0.0) for _ in range(2)]
    changed = outcome(open_at(llama, config), advantage=1e-3)
    assert unequal(outcomes[0], outcomes[1]) == []
    assert len(unequal(outcomes[0], changed)) > 20


def outcome(trainer: Any, advantage: float) -> dict[str, Tensor]:
    """Everything that two steps leave behind; ``advantage`` is added to one token's."""
    sequences = random_sequences(LENGTHS)
    sequences[2].advantages[1] += advantage
    observed = Observed()
    results = [trainer.train_step([sequences[:2], sequences[2:]], PPO, observed) for _ in range(2)]
    scalars = [value for r in results for value in (r.loss, r.grad_norm, r.learning_rate)]
    log_probs = [torch.from_numpy(part) for r in results for part in r.log_probs]
    return {
        "scalars": torch.tensor(scalars, dtype=torch.float64),
        "log_probs": torch.cat(log_probs),
        **{f"gradient {name}": tensor for name, tensor in observed.seen.items()},
        **snapshot(trainer.optimizer_state()),
        **snapshot(trainer.weights()),
    }


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_scoring_and_training_forward_give_the_same_bits(dtype: str, llama: Path, open_at: Callable[..., Any]) -> None:
    trainer = open_at(llama, run_config(0.7, dtype=dtype))
    sequences = random_sequences(LENGTHS)
    microbatches = [sequences[:1], sequences[1:]]
    scored = trainer.log_probs(microbatches)
    trained = trainer.train_step(microbatches, PPO, Observed()).log_probs
    again = trainer.log_probs(microbatches)
    assert [np.array_equal(a, b) for a, b in zip(scored, trained, strict=True)] == [True] * 4
    assert not any(np.array_equal(a, b) for a, b in zip(trained, again, strict=True))


def test_weights_are_hf_names_in_the_training_dtype(llama: Path, open_at: Callable[..., Any]) -> None:
    trainer = open_at(llama, run_config(dtype="bf16", lr=1e-2))
    before = snapshot(trainer.weights())
    names = list(before)
    assert names[:3] == [
        "model.embed_tokens.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.self_attn.q_proj.weight",
    ]
    assert names[-1] == "model.norm.weight"
    trainer.train_step([random_sequences(LENGTHS)], PPO, Observed())
    after = dict(trainer.weights())
    assert list(after) == names
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}
    assert all(tensor.is_contiguous() for tensor in after.values())
    assert unequal(before, after) == names


def test_optimizer_state_is_fp32_and_masters_round_to_the_weights(llama: Path, open_at: Callable[..., Any]) -> None:
    trainer = open_at(llama, run_config(dtype="bf16"))
    fresh = snapshot(trainer.optimizer_state())
    assert all(not tensor.any() for name, tensor in fresh.items() if not name.endswith(".master"))
    trainer.train_step([random_sequences(LENGTHS)], PPO, Observed())
    state = dict(trainer.optimizer_state())
    assert list(state) == list(fresh)
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    weights = dict(trainer._model.named_parameters())
    assert len(state) == 3 * len(weights)
    for name, weight in weights.items():
        assert torch.equal(state[f"{name}.master"].bfloat16(), weight)
        assert state[f"{name}.exp_avg"].any()
        assert state[f"{name}.exp_avg_sq"].any()


def test_metrics_are_means_over_tokens_by_weight(llama: Path, open_at: Callable[..., Any]) -> None:
    sequences = random_sequences(((2, 3), (4, 1)))
    sequences = [
        replace(s, weights=w) for s, w in zip(sequences, (np.float32([0, 2, 1]), np.float32([1])), strict=True)
    ]

    def numbered(batch: TokenBatch) -> TokenLoss:
        return TokenLoss(-batch.log_probs, {"place": torch.arange(len(batch.log_probs)).float() + 1})

    result = open_at(llama).train_step([sequences[:1], sequences[1:]], numbered, Observed())
    assert result.metrics == {"place": (0 * 1 + 2 * 2 + 1 * 3 + 1 * 1) / 4}
    assert result.loss == pytest.approx(-(result.log_probs[0] @ np.float32([0, 2, 1]) + result.log_probs[1][0]))


def test_reference_log_probs_reach_the_loss(llama: Path, open_at: Callable[..., Any]) -> None:
    seen: list[Any] = []

    def look(batch: TokenBatch) -> TokenLoss:
        seen.append(batch)
        return PPO(batch)

    sequences = [replace(s, reference_log_probs=s.advantages) for s in random_sequences(LENGTHS)]
    open_at(llama).train_step([sequences], look, Observed())
    assert torch.equal(seen[0].reference_log_probs, torch.from_numpy(np.concatenate([s.advantages for s in sequences])))
    assert torch.equal(seen[0].old_log_probs, seen[0].log_probs.detach())


@pytest.mark.parametrize("where", ["loss", "gradient", "old log-prob"])
def test_what_is_not_finite_is_named_and_changes_nothing(where: str, llama: Path, open_at: Callable[..., Any]) -> None:
    trainer = open_at(llama)
    sequences = random_sequences(LENGTHS)
    trainer.train_step([sequences], PPO, Observed())
    before = {**snapshot(trainer.weights()), **snapshot(trainer.optimizer_state())}
    bad, loss, message = broken(where, sequences)
    observed = Observed()
    with pytest.raises(BackendError, match=message):
        trainer.train_step([bad[:2], bad[2:]], loss, observed)
    assert observed.seen == {}
    assert unequal(before, {**snapshot(trainer.weights()), **snapshot(trainer.optimizer_state())}) == []
    after = trainer.train_step([sequences], PPO, Observed())
    clean = open_at(llama)
    clean.train_step([sequences], PPO, Observed())
    assert after.loss == clean.train_step([sequences], PPO, Observed()).loss
    assert unequal(snapshot(trainer.weights()), snapshot(clean.weights())) == []


def broken(where: str, sequences: list[TrainSequence]) -> tuple[list[TrainSequence], Any, str]:
    bad = list(sequences)
    if where == "loss":
        bad[2] = replace(bad[2], advantages=np.full(3, np.nan, np.float32))
        return bad, PPO, r"microbatch 1: the loss of 3 tokens is not finite, in samples \(2, 0\) "
    if where == "old log-prob":
        bad[0] = replace(bad[0], old_log_probs=np.full(12, -np.inf, np.float32))
        return bad, PPO, r"microbatch 0: .* in samples \(0, 0\) "

    def steep(batch: TokenBatch) -> TokenLoss:
        return TokenLoss((batch.log_probs - batch.log_probs.detach()).sqrt(), {})  # slope 1 / 0

    return bad, steep, "the gradient of .* is not finite"


@pytest.mark.parametrize("setting", [{"lr": 1e39}, {"lr": 1e19, "weight_decay": 1e30}])
def test_an_update_that_ruins_a_weight_is_an_error_that_names_it(
    setting: dict[str, float], llama: Path, open_at: Callable[..., Any]
) -> None:
    trainer = open_at(llama, run_config(**setting))
    with pytest.raises(BackendError, match=r"VIME-BACKEND-025: the update made the weight \S+ not finite"):
        trainer.train_step([random_sequences(LENGTHS)], PPO, Observed())
    assert any(not bool(tensor.isfinite().all()) for _, tensor in trainer.weights())


def test_weights_that_are_large_and_finite_are_no_error(llama: Path, open_at: Callable[..., Any]) -> None:
    trainer = open_at(llama, run_config(lr=1e30))
    trainer.train_step([random_sequences(LENGTHS)], PPO, Observed())
    assert max(float(tensor.abs().max()) for _, tensor in trainer.weights()) > 1e29


def entropy_bonus(coefficient: float) -> ConfiguredLoss:
    return ConfiguredLoss(ppo_clip, PpoClipOptions.model_validate({"entropy_coefficient": coefficient}))


@pytest.mark.parametrize("recompute", [False, True])
def test_the_entropy_bonus_agrees_with_an_independent_computation(
    recompute: bool, save_hf: Callable[..., tuple[Any, Path]], open_at: Callable[..., Any]
) -> None:
    model, place = save_hf("qwen2", tie_word_embeddings=True)
    trainer, sequences, temperature = open_at(place, run_config(0.8)), random_sequences(LENGTHS), 0.8
    ours = trainer.gradients([sequences[:3], sequences[3:]], entropy_bonus(0.3), recompute=recompute)
    for s in sequences:
        logits = model(torch.tensor([s.tokens])).logits[0, s.response_start - 1 : -1].double() / temperature
        chosen = hf_log_probs(model, s, temperature)
        surrogate = (chosen - chosen.detach()).exp() * torch.from_numpy(s.advantages)
        objective = surrogate + 0.3 * torch.distributions.Categorical(logits=logits).entropy()
        (-(torch.from_numpy(s.weights) * objective).sum()).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert set(ours) == set(expected)
    assert max(relative(ours[name], expected[name]) for name in expected) < 1e-4
    without = trainer.gradients([sequences], PPO)
    assert max(relative(without[name], expected[name]) for name in expected) > 1e-2


def test_the_entropy_is_a_metric(llama: Path, open_at: Callable[..., Any]) -> None:
    result = open_at(llama).train_step([random_sequences(LENGTHS)], entropy_bonus(0.3), Observed())
    assert 0.5 < result.metrics["entropy"] < np.log(VOCABULARY)
    assert "entropy" not in open_at(llama).train_step([random_sequences(LENGTHS)], PPO, Observed()).metrics
