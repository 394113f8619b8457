"""The reference against finite differences, and a live trainer whose backward is broken."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fakes import FakePrompts, FakeTrainer, linear_loss, make_sides
from torch import Tensor

from vime_core.backends import LossFunction, Microbatches, NamedTensors, StateObserver
from vime_core.config.schema import RunConfig
from vime_core.errors import PluginError
from vime_core.loop.sides import Parts
from vime_core.rl import losses
from vime_core.types import KeptTokens, TrainSequence, TrainStepResult
from vime_core.verify.gradient_live import GradientOptions, gradient_sequences, verify_gradient
from vime_core.verify.reference_model import (
    _left_to_choose,
    errors_against_fp64,
    open_reference,
    reference_gradients,
)
from vime_core.verify.token_loss import with_policies, written_out

pytest.importorskip("transformers")

SHAPE: Mapping[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="module", params=["qwen2", "qwen3", "llama"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """A HF directory without weights, and weights of realistic scale in fp32."""
    return make_model(request.param, tmp_path_factory.mktemp(request.param))


def make_model(model_type: str, directory: Path) -> tuple[Path, dict[str, Tensor]]:
    from transformers import AutoConfig, AutoModelForCausalLM

    tied = model_type != "llama"
    config = AutoConfig.for_model(model_type, **SHAPE, head_dim=8, tie_word_embeddings=tied)
    config.save_pretrained(directory)
    causal_lm: Any = AutoModelForCausalLM
    generator = torch.Generator().manual_seed(1)
    weights = {
        name: 0.2 * torch.randn(parameter.shape, generator=generator) + float("norm" in name)
        for name, parameter in causal_lm.from_config(config).named_parameters()
    }
    return directory, weights


def sequences() -> list[TrainSequence]:
    made = gradient_sequences(parts(Path("/nonexistent")), GradientOptions(sequences=3, prompt=6, response=5))
    scores = np.linspace(-4, -1, 5, dtype=np.float32)
    return [with_policies(sequence, scores - np.float32(n), n) for n, sequence in enumerate(made)]


def parts(directory: Path, dtype: str = "fp32") -> Any:
    return Parts(
        config=RunConfig.model_validate(
            {
                "run": {},
                "model": {},
                "data": {"source": "none"},
                "reward": {"name": "none"},
                "sampling": {"temperature": 0.7, "max_tokens": 6},
                "rollout": {"context_length": 64},
                "trainer": {"dtype": dtype, "token_budget": 64, "clip_grad": 0.05},
            }
        ),
        plugins=_UNUSED,
        launcher=_UNUSED,
        model=directory,
        alignment=None,
        tokenizer=_UNUSED,
        prompts=_PROMPTS,
        algorithm=_ALGORITHM,
    )


_UNUSED: Any = None
_PROMPTS: Any = FakePrompts()
_ALGORITHM: Any = SimpleNamespace(loss=linear_loss)


def test_the_reference_is_fp64_throughout(model: tuple[Path, dict[str, Tensor]]) -> None:
    """Central differences with a step of 1e-6 are right to 1e-8 only if no part of the model rounds to fp32."""
    directory, weights = model
    reference = open_reference(directory, weights.items(), torch.float64)
    found = reference_gradients(reference, sequences(), 0.7, written_out)
    for name, parameter in reference.named_parameters():
        place = int(found[name].abs().argmax())
        wanted = float(found[name].view(-1)[place])
        losses = [_loss_at(reference, parameter, place, step) for step in (1e-6, -1e-6)]
        assert (losses[0] - losses[1]) / 2e-6 == pytest.approx(wanted, rel=1e-6, abs=1e-9), name


def _loss_at(reference: Any, parameter: Tensor, place: int, step: float) -> float:
    from vime_core.verify.reference_model import _loss

    with torch.no_grad():
        flat = parameter.view(-1)
        before = flat[place].clone()
        flat[place] += step
        loss = sum(float(_loss(reference, sequence, 0.7, written_out)) for sequence in sequences())
        flat[place] = before
    return loss


def test_plain_transformers_is_within_its_own_bound(model: tuple[Path, dict[str, Tensor]]) -> None:
    directory, weights = model
    opened = open_reference(directory, weights.items(), torch.float32)
    plain = reference_gradients(opened, sequences(), 0.7, written_out)
    errors, norm = errors_against_fp64(directory, weights, "fp32", sequences(), 0.7, plain, None, written_out)
    assert [one.name for one in errors] == list(weights)
    assert all(one.within and not one.noisy and one.error < 1e-4 for one in errors)
    assert norm > 0.01


def test_other_names_give_no_reference(model: tuple[Path, dict[str, Tensor]]) -> None:
    directory, weights = model
    with pytest.raises(PluginError, match="no weight 'extra'"):
        open_reference(directory, [*weights.items(), ("extra", torch.zeros(1))], torch.float64)
    (directory.parent / "unknown").mkdir(exist_ok=True)
    (directory.parent / "unknown" / "config.json").write_text('{"model_type": "nobody-knows-it"}')
    with pytest.raises(PluginError, match="transformers gives no reference"):
        open_reference(directory.parent / "unknown", weights.items(), torch.float64)


class TorchTrainer(FakeTrainer):
    """A trainer of plain transformers in fp32 with a learning rate of 0."""

    def __init__(self, directory: Path, weights: dict[str, Tensor]) -> None:
        super().__init__(weights, 0.7)
        self.model = open_reference(directory, weights.items(), torch.float32)
        self.rate = 0.0
        self.misplace: Callable[[TrainSequence], TrainSequence] = lambda sequence: sequence
        self.moments: dict[str, Tensor] = {n: torch.zeros_like(p) for n, p in self.model.named_parameters()}
        self.hand_over: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda gradients: gradients

    def _score(self, sequence: TrainSequence) -> Any:
        return self._tensor(sequence).detach().numpy()

    def _tensor(self, sequence: TrainSequence) -> Tensor:
        logits = self.model(torch.tensor([sequence.tokens]), use_cache=False).logits[0] / self.temperature
        rows = _left_to_choose(logits[sequence.response_start - 1 : -1], sequence).log_softmax(-1)
        return rows.gather(-1, torch.tensor(sequence.tokens[sequence.response_start :])[:, None])[:, 0]

    def gradients(
        self, microbatches: Microbatches, loss: LossFunction, *, recompute: bool = False
    ) -> dict[str, Tensor]:
        from vime_core.rl.losses import TokenBatch

        del recompute
        self.calls += 1
        self.model.zero_grad()
        for microbatch in microbatches:
            for one in microbatch:
                one = self.misplace(one)
                scored = self._tensor(one)
                given = {"old_log_probs": scored.detach(), "advantages": one.advantages}
                given |= {name: value for name in POLICIES if (value := getattr(one, name)) is not None}
                tokens = loss(TokenBatch(scored, **{n: torch.as_tensor(v) for n, v in given.items()}))
                (torch.from_numpy(one.weights) * tokens.loss_N).sum().backward()
        found = {name: parameter.grad.clone() for name, parameter in self.model.named_parameters()}
        return self.change_gradients(self.calls, found)

    def train_step(self, microbatches: Microbatches, loss: LossFunction, observer: StateObserver) -> TrainStepResult:
        scores = [self._score(s) for part in microbatches for s in part]
        scores[0] = (scores[0].view(np.uint32) + np.uint32(self.training_error)).view(np.float32)
        gradients = self.gradients(microbatches, loss)
        observer.gradients((f"mine.{name}", gradient) for name, gradient in gradients.items())
        norm = float(torch.stack([gradient.norm() for gradient in gradients.values()]).norm())
        taken = self.hand_over({name: gradient.clone() for name, gradient in gradients.items()})
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                clipped = taken[name] * min(1.0, CLIP / (norm + 1e-6))
                self.moments[name].mul_(0.9).add_(clipped, alpha=0.1)
                parameter -= self.rate * clipped
        return TrainStepResult(0.5, norm, self.rate, tuple(scores))

    def optimizer_state(self) -> NamedTensors:
        for name, moment in self.moments.items():
            yield f"mine.{name}.exp_avg", moment
            yield f"mine.{name}.exp_avg_sq", moment

    def by_hf_name(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {name.removeprefix("mine."): tensor for name, tensor in tensors.items()}

    def weights(self) -> NamedTensors:
        return self.model.named_parameters()


@pytest.fixture
def trainer(tmp_path: Path) -> tuple[Any, TorchTrainer]:
    directory, weights = make_model("qwen2", tmp_path)
    return parts(directory), TorchTrainer(directory, weights)


CLIP = 0.05
POLICIES = ("old_log_probs", "reference_log_probs")
OPTIONS = GradientOptions(sequences=3, prompt=6, response=5)


def test_a_right_backward_holds(trainer: tuple[Any, TorchTrainer]) -> None:
    verdict = verify_gradient(*trainer, OPTIONS)
    assert verdict.exit_code == 0, verdict.sentence
    assert verdict.coverage.samples == 3
    assert verdict.details["passes"][-1] == "gradients with recomputed layers"
    assert "within their bound of fp64 autograd" in verdict.sentence


def scaled(name: str, factor: float) -> Callable[[int, dict[str, Tensor]], dict[str, Tensor]]:
    return lambda _call, gradients: gradients | {name: gradients[name] * factor}


V_BIAS = "model.layers.1.self_attn.v_proj.bias"


@pytest.mark.parametrize("factor", [1.0001, -1.0, 0.0])
def test_a_wrong_gradient_is_named(trainer: tuple[Any, TorchTrainer], factor: float) -> None:
    """One that repeats bit for bit is found by fp64 alone."""
    trainer[1].change_gradients = scaled(V_BIAS, factor)
    verdict = verify_gradient(*trainer, OPTIONS)
    assert (verdict.exit_code, verdict.first) == (1, f"gradient '{V_BIAS}'")


@pytest.mark.parametrize("call", [2, 4])
def test_one_bit_of_one_gradient_in_one_pass(trainer: tuple[Any, TorchTrainer], call: int) -> None:
    def flip(number: int, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        if number == call:
            gradients[V_BIAS].view(torch.int32)[3] ^= 1
        return gradients

    trainer[1].change_gradients = flip
    verdict = verify_gradient(*trainer, OPTIONS)
    assert (verdict.exit_code, verdict.first) == (1, f"pass {call - 1}, gradient '{V_BIAS}'")


@pytest.mark.parametrize("factor", [-1.0, 0.0, 1.001])
def test_a_train_step_alone_that_is_wrong(trainer: tuple[Any, TorchTrainer], factor: float) -> None:
    """Each train step the same, so that repeating it shows nothing."""
    train = {1, 2}
    trainer[1].change_gradients = lambda call, found: scaled(V_BIAS, factor)(call, found) if call in train else found
    verdict = verify_gradient(*trainer, OPTIONS)
    assert (verdict.exit_code, verdict.first) == (1, f"pass 2, gradient '{V_BIAS}'")


@pytest.mark.parametrize("factor", [-1.0, 0.0, 1.001])
def test_an_optimizer_that_is_handed_another_gradient(trainer: tuple[Any, TorchTrainer], factor: float) -> None:
    """What the step shows is right."""
    trainer[1].hand_over = lambda gradients: gradients | {V_BIAS: gradients[V_BIAS] * factor}
    verdict = verify_gradient(*trainer, OPTIONS)
    assert (verdict.exit_code, verdict.first) == (1, f"pass 0, gradient '{V_BIAS}' in the optimizer")
    assert f"first {factor:g} times that of '{V_BIAS}'" in verdict.sentence


def test_an_optimizer_that_hides_what_it_took(
    trainer: tuple[Any, TorchTrainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer[1], "optimizer_state", lambda: iter(()))
    verdict = verify_gradient(*trainer, OPTIONS)
    assert (verdict.exit_code, verdict.first) == (3, "optimizer")


def test_a_training_forward_of_its_own(trainer: tuple[Any, TorchTrainer]) -> None:
    trainer[1].training_error = 1
    verdict = verify_gradient(*trainer, OPTIONS)
    assert (verdict.exit_code, verdict.first) == (1, "pass 0, response token 0")


def means(values: Any) -> Any:
    return np.full_like(values, values.mean())


MISPLACED: dict[str, Callable[[TrainSequence], TrainSequence]] = {
    "one advantage for a sequence": lambda s: replace(s, advantages=means(s.advantages)),
    "one weight for a sequence": lambda s: replace(s, weights=means(s.weights)),
    "old log-probs of the next token": lambda s: replace(s, old_log_probs=np.roll(s.old_log_probs, 1)),
    "no old log-probs": lambda s: replace(s, old_log_probs=None),
    "reference log-probs of the next token": lambda s: replace(
        s, reference_log_probs=np.roll(s.reference_log_probs, 1)
    ),
    "what was kept of the next token": lambda s: replace(s, kept=rolled(s)),
    "masked tokens that count": lambda s: replace(s, weights=np.maximum(s.weights, s.weights.max() / 9)),
}


def rolled(sequence: TrainSequence) -> KeptTokens:
    """The sets of a sequence in the opposite order, each with its own sampled token."""
    ends = np.cumsum((0, *sequence.kept.counts))
    sets = [sequence.kept.tokens[a:b] for a, b in pairwise(ends.tolist())][::-1]
    own = sequence.tokens[sequence.response_start :]
    sets = [sorted({*ids, token}) if ids else [] for ids, token in zip(sets, own, strict=False)]
    return KeptTokens(tuple(token for ids in sets for token in ids), tuple(map(len, sets)))


@pytest.mark.parametrize("fault", MISPLACED)
def test_what_a_sequence_brings_is_misplaced_within_it(trainer: tuple[Any, TorchTrainer], fault: str) -> None:
    """In every pass alike, so that fp64 alone finds it."""
    trainer[1].misplace = MISPLACED[fault]
    verdict = verify_gradient(*trainer, GradientOptions(sequences=3, prompt=6, response=12))
    assert verdict.exit_code == 1, verdict.sentence
    assert "farther from fp64 autograd" in verdict.sentence


@pytest.mark.parametrize("change", [{"dual_clip": 0.0}, {"clip_high": 0.9}, {"kl": "k1"}, {"kl_coefficient": 0.11}])
def test_a_loss_of_other_terms(
    trainer: tuple[Any, TorchTrainer], monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    right = losses.ppo_clip
    monkeypatch.setattr(losses, "ppo_clip", lambda batch, options: right(batch, options.model_copy(update=change)))
    verdict = verify_gradient(*trainer, GradientOptions(sequences=3, prompt=6, response=12))
    assert verdict.exit_code == 1, verdict.sentence
    assert "farther from fp64 autograd" in verdict.sentence


def test_a_step_that_moves_weights_compares_nothing(trainer: tuple[Any, TorchTrainer]) -> None:
    trainer[1].rate = 0.1
    verdict = verify_gradient(*trainer, OPTIONS)
    assert verdict.exit_code == 3
    assert "changed the weights" in verdict.sentence


def test_a_trainer_without_named_gradients(trainer: tuple[Any, TorchTrainer]) -> None:
    names = ("log_probs", "train_step", "weights", "optimizer_state")
    plain: Any = SimpleNamespace(**{name: getattr(trainer[1], name) for name in names})
    verdict = verify_gradient(trainer[0], plain, OPTIONS)
    assert verdict.exit_code == 3
    assert "no gradients by HF name" in verdict.sentence


def test_a_structure_without_a_reference(trainer: tuple[Any, TorchTrainer]) -> None:
    given, live = trainer
    (given.model / "config.json").write_text('{"model_type": "nobody-knows-it"}')
    verdict = verify_gradient(given, live, OPTIONS)
    assert verdict.exit_code == 3
    assert "transformers gives no reference for this model" in verdict.sentence


def test_sequences_fit_and_differ() -> None:
    made = gradient_sequences(make_sides().parts, GradientOptions())
    assert len({s.tokens for s in made}) == 6
    assert {s.response_length for s in made} == {16}
    assert len({s.response_start for s in made}) > 1
    for sequence in made:
        assert len({float(a) for a in sequence.advantages}) > 3
        assert {float(np.sign(a)) for a in sequence.advantages} == {1.0, -1.0}
        assert len({float(w) for w in sequence.weights}) == 4
        assert 0.0 in sequence.weights
    assert [bool(s.kept.counts) for s in made] == [False, True] * 3
