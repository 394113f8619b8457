"""A whole backend in a page: a bigram table as the model, trained by AdamW and sampled from, both deterministic.

It is real enough for what it serves: its tokens depend on the weights, its weights on tokens, rewards, moments and
count of steps, so whatever a resume forgets changes a digest. And it starts in no time.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from vime_core.backends import LossFunction, Microbatches, NamedTensors, RolloutContext, StateObserver, TrainerContext
from vime_core.errors import RecordError
from vime_core.plugins import ModelSource, ModelStructure, RolloutEngine, TrainerBackend, hookimpl
from vime_core.plugins.types import Options
from vime_core.record.digest import digest_tensors
from vime_core.rl.losses import TokenBatch
from vime_core.types import Completion, Float32Array, ProcessReport, SampleRequest, TrainSequence, TrainStepResult

NAME = "bigram.weight"
STOP = 2
VOCABULARY = 259


@hookimpl
def vime_trainers() -> Iterable[TrainerBackend]:
    yield TrainerBackend("bigram", "A bigram table.", "bigram:open_trainer")


@hookimpl
def vime_rollouts() -> Iterable[RolloutEngine]:
    yield RolloutEngine("bigram", "A bigram table.", "bigram:open_rollout")


@hookimpl
def vime_model_sources() -> Iterable[ModelSource]:
    yield ModelSource("bigram", "A bigram table.", "bigram:make_model")


@hookimpl
def vime_model_structures() -> Iterable[ModelStructure]:
    yield ModelStructure("bigram", "A bigram table.", "bigram:NAME", backend="bigram")


OVERRIDES = [
    "plugins.modules=['bigram']",
    "model.source=bigram",
    "trainer.backend=bigram",
    "rollout.backend=bigram",
    "run.sinks=['jsonl']",
]


def make_model(options: Options, cache: Path) -> Path:
    """The tokenizer of ``random-qwen2`` with a model type of its own."""
    from vime_megatron.sources.random_qwen2 import RandomQwen2Options, make_random_qwen2

    directory = cache / "bigram"
    if not directory.exists():
        source = RandomQwen2Options(seed=0, layers=1, hidden=8, intermediate=8, vocabulary=VOCABULARY, context=1024)
        shutil.copytree(make_random_qwen2(source, cache), directory)
        (directory / "config.json").write_text(json.dumps({"model_type": "bigram"}))
    return directory


def initial_table() -> Tensor:
    return torch.randn((VOCABULARY, VOCABULARY), generator=torch.Generator().manual_seed(5))


def report(role: Any) -> ProcessReport:
    return ProcessReport(role, 0, os.getpid(), {}, {}, {"torch": torch.__version__}, {})


class Trainer:
    """A `vime_core.backends.Trainer`."""

    def __init__(self, context: TrainerContext) -> None:
        self._config = context.config.trainer
        self.table = initial_table()
        self.moments = [torch.zeros_like(self.table), torch.zeros_like(self.table)]
        self.count = torch.zeros((), dtype=torch.int64)
        self.reference = self.table

    def _score(self, table: Tensor, sequence: TrainSequence) -> Tensor:
        tokens = torch.tensor(sequence.tokens)
        rows = table[tokens[sequence.response_start - 1 : -1]].log_softmax(-1)
        return rows.gather(-1, tokens[sequence.response_start :, None])[:, 0]

    def log_probs(self, microbatches: Microbatches) -> list[Float32Array]:
        return [self._score(self.table, s).numpy() for part in microbatches for s in part]

    def train_step(self, microbatches: Microbatches, loss: LossFunction, observer: StateObserver) -> TrainStepResult:
        table = self.table.clone().requires_grad_()
        scores: list[Float32Array] = []
        total = torch.zeros(())
        for sequence in (s for part in microbatches for s in part):
            log_probs = self._score(table, sequence)
            scores.append(log_probs.detach().numpy())
            total = total + self._loss(sequence, log_probs, loss)
        total.backward()
        assert table.grad is not None
        observer.gradients(iter([(NAME, table.grad)]))
        return TrainStepResult(float(total.detach()), float(table.grad.norm()), self._update(table.grad), tuple(scores))

    def _loss(self, sequence: TrainSequence, log_probs: Tensor, loss: LossFunction) -> Tensor:
        old, reference = sequence.old_log_probs, sequence.reference_log_probs
        batch = TokenBatch(
            log_probs,
            log_probs.detach() if old is None else torch.from_numpy(old),
            torch.from_numpy(sequence.advantages),
            None if reference is None else torch.from_numpy(reference),
            (len(log_probs),),
        )
        return (loss(batch).loss_N * torch.from_numpy(sequence.weights)).sum()

    def _update(self, gradient: Tensor) -> float:
        self.count += 1
        count, rate = int(self.count), self._config.lr * min(1.0, int(self.count) / max(1, self._config.warmup_steps))
        for moment, beta, value in zip(self.moments, self._config.betas, (gradient, gradient.square()), strict=True):
            moment.mul_(beta).add_(value, alpha=1 - beta)
        first, second = (m / (1 - b**count) for m, b in zip(self.moments, self._config.betas, strict=True))
        self.table -= rate * first / (second.sqrt() + self._config.eps)
        return rate

    def keep_reference(self) -> None:
        self.reference = self.table.clone()

    def reference_log_probs(self, microbatches: Microbatches) -> list[Float32Array]:
        return [self._score(self.reference, s).numpy() for part in microbatches for s in part]

    def weights(self) -> NamedTensors:
        return iter([(NAME, self.table)])

    def optimizer_state(self) -> NamedTensors:
        return iter([*zip(("exp_avg", "exp_avg_sq"), self.moments, strict=True), ("count", self.count)])

    def save(self, directory: Path) -> None:
        save_file(
            dict([*self.weights(), *self.optimizer_state(), ("reference", self.reference.clone())]),
            directory / "state.safetensors",
        )

    def load(self, directory: Path) -> None:
        try:
            state = load_file(directory / "state.safetensors")
        except OSError as error:
            raise RecordError(str(error), remedy="Use another.", code="VIME-RECORD-000") from error
        self.table, self.count, self.reference = state[NAME], state["count"], state["reference"]
        self.moments = [state["exp_avg"], state["exp_avg_sq"]]

    def processes(self) -> list[ProcessReport]:
        return [report("trainer")]

    def close(self) -> None:
        """Nothing is held."""


class Rollout:
    """A `vime_core.backends.Rollout`."""

    def __init__(self) -> None:
        self.table = initial_table()
        self.version = 0

    def generate(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: SampleRequest) -> Completion:
        tokens, log_probs = zip(*self._sample(request), strict=True)
        reason: Any = "stop" if tokens[-1] == STOP else "length"
        values = np.array(log_probs, dtype=np.float32)
        return Completion(request.prompt_index, request.sample_index, tokens, values, reason, self.version)

    def _sample(self, request: SampleRequest) -> Iterator[tuple[int, float]]:
        generator = torch.Generator().manual_seed(request.seed)
        last = request.prompt_tokens[-1]
        for _ in range(request.max_tokens):
            row = self.table[last].log_softmax(-1)
            drawn = torch.multinomial(row.exp(), 1, generator=generator) if request.temperature else row.argmax()
            last = int(drawn)
            yield last, float(row[last])
            if last == STOP:
                return

    def update_weights(self, weights: NamedTensors, version: int) -> dict[str, str]:
        self.table = dict(weights)[NAME].clone()
        self.version = version
        return dict(self.weight_digests())

    def weight_digests(self) -> dict[str, str]:
        return dict(digest_tensors(iter([(NAME, self.table)])))

    def processes(self) -> list[ProcessReport]:
        return [report("rollout")]

    def close(self) -> None:
        """Nothing is held."""


def open_trainer(context: TrainerContext) -> Trainer:
    return Trainer(context)


def open_rollout(context: RolloutContext) -> Rollout:
    del context
    return Rollout()
