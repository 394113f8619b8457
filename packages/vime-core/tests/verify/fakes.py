"""A trainer and an engine of a few lines over one tiny language model, and ways to break either.

Both call the same function for a token's distribution, so they agree in every bit; each fault is planted in a live
object, as a test of a real engine would.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vime_core.backends import LossFunction, Microbatches, NamedTensors, StateObserver
from vime_core.config.schema import RunConfig
from vime_core.errors import PolicyError
from vime_core.loop.algorithm import Algorithm
from vime_core.loop.prompts import Prompt
from vime_core.loop.sides import Parts, Sides
from vime_core.record.digest import digest_tensors
from vime_core.rl.losses import TokenBatch, TokenLoss
from vime_core.types import (
    Completion,
    Drawn,
    Float32Array,
    ProcessReport,
    SampleKey,
    SampleRequest,
    TrainSequence,
    TrainStepResult,
)

VOCABULARY = 40
HIDDEN = 8
CONTEXT = 64
PAGE = 16
Weights = dict[str, Tensor]


def initial_weights(scale: float = 1.0) -> Weights:
    generator = torch.Generator().manual_seed(3)
    shapes = {"embedding.weight": (VOCABULARY, HIDDEN), "mix.weight": (HIDDEN,), "head.weight": (VOCABULARY, HIDDEN)}
    return {n: (scale * torch.randn(s, generator=generator)).to(torch.bfloat16) for n, s in shapes.items()}


def taps_at(weights: Mapping[str, Tensor], tokens: Sequence[int], position: int) -> dict[str, Tensor]:
    """Every intermediate of one position: its distribution depends on it and the two tokens before it."""
    rows = [weights["embedding.weight"][token].double() for token in tokens[max(0, position - 2) : position + 1]]
    mixed = (sum(rows[:-1], torch.zeros(HIDDEN, dtype=torch.float64)) * weights["mix.weight"].double()).float()
    hidden = (rows[-1].float() + mixed).to(torch.bfloat16)
    logits = (weights["head.weight"].double() @ hidden.double()).to(torch.bfloat16)
    return {
        "embedding": rows[-1].to(torch.bfloat16),
        "layers.0.attention": mixed,
        "layers.0.hidden_state": hidden,
        "logits": logits,
    }


def distribution(logits: Tensor, temperature: float) -> Float32Array:
    z = logits.double().numpy() / (temperature or 1.0)
    z = z - z.max()
    return (z - np.log(np.exp(z).sum())).astype(np.float32)


def next_log_probs(weights: Mapping[str, Tensor], tokens: Sequence[int], temperature: float) -> Float32Array:
    return distribution(taps_at(weights, tokens, len(tokens) - 1)["logits"], temperature)


Change = Callable[[str, int, Tensor], Tensor]
"""(tap name, position, row) to row: an operation swapped on one side."""


class FakeTrainer:
    """`vime_core.backends.AlignedTrainer` with attributes that break it."""

    def __init__(self, weights: Weights, temperature: float) -> None:
        self.held = weights
        self.temperature = temperature
        self.step_size = 0.5
        self.training_error = 0
        self.change: Change = lambda _name, _position, row: row
        self.change_scores: Callable[[list[Float32Array]], list[Float32Array]] = lambda scores: scores
        self.change_gradients: Callable[[int, Weights], Weights] = lambda _call, gradients: gradients
        self.calls = 0

    def log_probs(self, microbatches: Microbatches) -> list[Float32Array]:
        return self.change_scores([self._score(s) for part in microbatches for s in part])

    def _score(self, sequence: TrainSequence) -> Float32Array:
        places = range(sequence.response_start, len(sequence.tokens))
        rows = [next_log_probs(self.held, sequence.tokens[:place], self.temperature) for place in places]
        values = [row[sequence.tokens[place]] for row, place in zip(rows, places, strict=True)]
        return np.array(values, dtype=np.float32)

    def gradients(self, microbatches: Microbatches, loss: LossFunction, *, recompute: bool = False) -> Weights:
        del loss, recompute
        total = sum(len(s.tokens) * (1 + index) for part in microbatches for index, s in enumerate(part))
        generator = torch.Generator().manual_seed(total)
        self.calls += 1
        found = {n: torch.randn(t.shape, generator=generator) for n, t in self.held.items()}
        return self.change_gradients(self.calls, found)

    def train_step(self, microbatches: Microbatches, loss: LossFunction, observer: StateObserver) -> TrainStepResult:
        scores = [self._score(s) for part in microbatches for s in part]
        scores[0] = (scores[0].view(np.uint32) + np.uint32(self.training_error)).view(np.float32)
        gradients = self.gradients(microbatches, loss)
        observer.gradients(iter(gradients.items()))
        for name, tensor in self.held.items():
            tensor += (self.step_size * gradients[name].sign() * tensor.abs().clamp(min=0.05)).to(torch.bfloat16)
        return TrainStepResult(0.25, 1.5, 0.001, tuple(scores))

    def by_hf_name(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return tensors

    def record_taps(self, sequence: TrainSequence) -> dict[str, tuple[Tensor, Tensor]]:
        positions = range(len(sequence.tokens))
        rows = [taps_at(self.held, sequence.tokens, position) for position in positions]
        return stacked(rows, list(positions), self.change)

    def draw_again(self, microbatches: Microbatches, requests: Mapping[SampleKey, SampleRequest]) -> list[Drawn]:
        return [self._draw(s, requests[s.key]) for part in microbatches for s in part]

    def _draw(self, sequence: TrainSequence, request: SampleRequest) -> Drawn:
        rng, places = np.random.default_rng(request.seed), range(sequence.response_start, len(sequence.tokens))
        rows = [next_log_probs(self.held, sequence.tokens[:place], request.temperature) for place in places]
        noise = [rng.gumbel(size=VOCABULARY) * bool(request.temperature) for _ in rows]
        tokens = tuple(int(np.argmax(row + one)) for row, one in zip(rows, noise, strict=True))
        return Drawn(tokens, self._score(sequence))

    def weights(self) -> NamedTensors:
        return iter(self.held.items())

    def optimizer_state(self) -> NamedTensors:
        return iter(())

    def save(self, directory: Path) -> None:
        raise NotImplementedError

    def load(self, directory: Path) -> None:
        raise NotImplementedError

    def processes(self) -> list[ProcessReport]:
        return []

    def close(self) -> None:
        """Nothing is held."""


def stacked(rows: list[dict[str, Tensor]], positions: list[int], change: Change) -> dict[str, tuple[Tensor, Tensor]]:
    names = list(rows[0])
    return {
        name: (
            torch.tensor(positions),
            torch.stack([change(name, p, row[name]) for p, row in zip(positions, rows, strict=True)]),
        )
        for name in names
    }


class FakeRollout:
    """`vime_core.backends.AlignedRollout` with attributes that break it."""

    def __init__(self, weights: Weights) -> None:
        self.held = {name: tensor.clone() for name, tensor in weights.items()}
        self.version = 0
        self.keeps_cache = False
        self.temperature_factor = 1.0
        self.change_row: Callable[[Sequence[SampleRequest], SampleRequest, Tensor], Tensor] = lambda _all, _one, row: (
            row
        )
        self.change_completions: Callable[[list[Completion]], list[Completion]] = lambda completions: completions
        self.change_draw: Callable[[SampleRequest, Float32Array, int], int] = lambda _request, _row, token: token
        self.own_draw = False
        self.keep_out: set[str] = set()
        self.lies_about_digests = False
        self.change: Change = lambda _name, _position, row: row
        self.can_chunk = True
        self.chunk = 0
        self.cached: dict[tuple[int, ...], Weights] = {}
        self.resets_cache = True
        self.chunk_error = 0.0
        self._last_cached: list[int] = []
        self.calls: list[list[SampleRequest]] = []

    def generate(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        self.calls.append(list(requests))
        if not self.keeps_cache and self.resets_cache:
            self.cached.clear()
        self._last_cached = [PAGE if self._prefix(r) in self.cached else 0 for r in requests]
        return self.change_completions([self._complete(requests, request) for request in requests])

    def _prefix(self, request: SampleRequest) -> tuple[int, ...]:
        return request.prompt_tokens[:PAGE] if len(request.prompt_tokens) > PAGE else (-1,)

    def _complete(self, requests: Sequence[SampleRequest], request: SampleRequest) -> Completion:
        rng, tokens, values = np.random.default_rng(request.seed), list(request.prompt_tokens), []
        weights = self.cached.get(self._prefix(request), self.held)
        for _ in range(request.max_tokens):
            logits = self.change_row(requests, request, taps_at(weights, tokens, len(tokens) - 1)["logits"])
            logits = logits + self.chunk_error * bool(self.chunk) * torch.arange(VOCABULARY)
            row = distribution(logits, (request.temperature or 1.0) * self.temperature_factor)
            noise = rng.gumbel(size=VOCABULARY) if request.temperature else np.zeros(VOCABULARY)
            token = self.change_draw(request, row, int(np.argmax(row + noise)))
            tokens.append(token)
            values.append(row[token])
        if len(request.prompt_tokens) > PAGE:
            self.cached[self._prefix(request)] = {name: tensor.clone() for name, tensor in weights.items()}
        return Completion(
            request.prompt_index,
            request.sample_index,
            tuple(tokens[len(request.prompt_tokens) :]),
            np.array(values, dtype=np.float32),
            "length",
            self.version,
        )

    def update_weights(self, weights: NamedTensors, version: int) -> Mapping[str, str]:
        for name, tensor in weights:
            if name not in self.keep_out:
                self.held[name] = tensor.clone()
        self.version = version
        return self.weight_digests()

    def weight_digests(self) -> Mapping[str, str]:
        return dict.fromkeys(self.held, "") if self.lies_about_digests else digest_tensors(self.held.items())

    def record_taps(self, request: SampleRequest) -> dict[str, tuple[Tensor, Tensor]]:
        completion = self.generate([request])[0]
        tokens = (*request.prompt_tokens, *completion.tokens)
        positions = list(range(len(tokens) - 1))
        taps = stacked([taps_at(self.held, tokens, position) for position in positions], positions, self.change)
        logits, start = taps["logits"], len(request.prompt_tokens) - 1
        return taps | {"logits": (logits[0][start:], logits[1][start:])}

    def prompt_log_probs(self, tokens: Sequence[int]) -> Float32Array:
        rows = [next_log_probs(self.held, tokens[:place], 1.0) for place in range(1, len(tokens))]
        return np.array([row[token] for row, token in zip(rows, tokens[1:], strict=True)], dtype=np.float32)

    def draws_by_contract(self) -> bool:
        return not self.own_draw

    def keep_prefix_cache(self, keep: bool) -> None:
        self.keeps_cache = keep

    def cached_tokens(self) -> list[int]:
        return list(self._last_cached)

    def prefill_in_chunks(self, tokens: int) -> None:
        if tokens and not self.can_chunk:
            raise PolicyError("this engine takes no chunks", remedy="None.")
        self.chunk = tokens

    def processes(self) -> list[ProcessReport]:
        return []

    def close(self) -> None:
        """Nothing is held."""


@dataclass(frozen=True)
class FakePrompts:
    """Prompts of different lengths; the third is longer than a page."""

    lengths: tuple[int, ...] = (3, 7, 24)

    def step(self, step: int) -> list[Prompt]:
        return [self._prompt(step, number, length) for number, length in enumerate(self.lengths)]

    def _prompt(self, step: int, number: int, length: int) -> Prompt:
        index = step * len(self.lengths) + number
        tokens = tuple((5 * index + 7 * place + place * place) % VOCABULARY for place in range(length))
        example: Any = None
        return Prompt(index, index, tokens, "", example)


def config(temperature: float = 0.8, contract: str = "", **trainer: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"seed": 5},
            "model": {},
            "data": {"source": "none"},
            "reward": {"name": "none"},
            "sampling": {"temperature": temperature, "max_tokens": 6, "prompts_per_step": 3, "samples_per_prompt": 2},
            "rollout": {"context_length": CONTEXT},
            "trainer": {"token_budget": CONTEXT, **trainer},
            "alignment": {"contract": contract},
        }
    )


def linear_loss(batch: TokenBatch) -> TokenLoss:
    return TokenLoss(-batch.advantages * batch.log_probs, {})


def make_sides(
    temperature: float = 0.8, *, scale: float = 1.0, aligned: bool = True, settings: Mapping[str, Any] | None = None
) -> Any:
    """A `Sides` of the two fakes; ``sides.trainer`` and ``sides.rollout`` are theirs to break."""
    run = config(temperature, "fake/v1" if aligned else "")
    weights = initial_weights(scale)
    unused: Any = None
    algorithm = Algorithm(run, unused, unused, linear_loss)
    contract: Any = SimpleNamespace(contract=SimpleNamespace(id="fake/v1")) if aligned else None
    prompts: Any = FakePrompts()
    parts = Parts(run, unused, unused, Path("/nonexistent"), contract, unused, prompts, algorithm)
    shown = {"block_size": PAGE, "prefix_caching": True, "stop_token_ids": [], **(settings or {})}
    report = ProcessReport("rollout", 0, 1, {}, shown, {}, {})
    trainer, rollout = FakeTrainer(weights, temperature), FakeRollout(weights)
    return Sides(parts, rollout, trainer, (report,), digest_tensors(weights.items()))


class PlainRollout:
    """An engine that offers no more than `vime_core.backends.Rollout`."""

    def __init__(self, rollout: FakeRollout) -> None:
        self.generate = rollout.generate
        self.update_weights = rollout.update_weights
        self.weight_digests = rollout.weight_digests


def without_insides(sides: Sides) -> Sides:
    """The same sides, whose engine offers no more than a stock one."""
    rollout: Any = PlainRollout(sides.rollout)  # pyright: ignore[reportArgumentType]
    parts = replace(sides.parts, config=config(), alignment=None)
    return replace(sides, rollout=rollout, parts=parts)
