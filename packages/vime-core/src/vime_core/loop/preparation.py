"""What a run is made of before any process starts: each part found, loaded and checked on first use, once."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from vime_core.alignment import Alignment, choose_alignment
from vime_core.config.schema import RunConfig
from vime_core.data.template import Tokenizer, load_tokenizer
from vime_core.determinism.policy import DeterminismPolicy
from vime_core.errors import PluginError
from vime_core.launch import Launcher
from vime_core.loop.algorithm import Algorithm, load_algorithm
from vime_core.loop.model import ModelFacts, model_directory, model_facts, model_type
from vime_core.loop.prompts import PromptStream
from vime_core.loop.streams import EvaluationStream, evaluation_streams, training_stream
from vime_core.plugins.manager import PluginManager
from vime_core.plugins.types import (
    DatasetSource,
    LauncherEntry,
    MetricSink,
    ModelSource,
    Registration,
    Reward,
    RolloutEngine,
    TrainerBackend,
)

_Entry = TypeVar("_Entry", bound=Registration)


class Preparation:
    """The parts of one configuration. Reading a part raises what stands in its way; what worked is kept.

    Raises:
        VimeError: of the kind that fits; PluginFailed where a plugin's own code raised.
    """

    def __init__(self, config: RunConfig, policy: DeterminismPolicy, plugins: PluginManager) -> None:
        self.config = config
        self.policy = policy
        self.plugins = plugins

    @cached_property
    def launcher(self) -> Launcher:
        entry = self._find(LauncherEntry, self.config.run.launcher, "run.launcher")
        target: Any = entry.load()
        with self.plugins.guarding(entry):
            return target(self.config, self.policy, self.plugins)

    @cached_property
    def sinks(self) -> tuple[MetricSink, ...]:
        """The registrations of ``run.sinks``, importable; opened when the record exists."""
        found = tuple(self._find(MetricSink, name, "run.sinks") for name in self.config.run.sinks)
        for entry in found:
            _load(entry, "run.sinks")
        return found

    @cached_property
    def backends(self) -> tuple[Registration, Registration]:
        """Trainer and rollout engine, importable."""
        trainer = self._find(TrainerBackend, self.config.trainer.backend, "trainer.backend")
        rollout = self._find(RolloutEngine, self.config.rollout.backend, "rollout.backend")
        _load(trainer, "trainer.backend")
        _load(rollout, "rollout.backend")
        return trainer, rollout

    @cached_property
    def model(self) -> Path:
        with self.plugins.guarding(self._find(ModelSource, self.config.model.source, "model.source")):
            return model_directory(self.config, self.plugins)

    @cached_property
    def facts(self) -> ModelFacts:
        return model_facts(self.model)

    @cached_property
    def alignment(self) -> Alignment | None:
        return choose_alignment(self.config, self.plugins, model_type(self.model))

    @cached_property
    def tokenizer(self) -> Tokenizer:
        _ = self.facts  # a bad config.json is no fault of the tokenizer's, but fails it too
        return load_tokenizer(self.model)

    @cached_property
    def prompts(self) -> PromptStream:
        with self.plugins.guarding(self._find(DatasetSource, self.config.data.source, "data.source")):
            return training_stream(self.config, self.plugins, self.tokenizer)

    @cached_property
    def evaluation(self) -> tuple[EvaluationStream, ...]:
        return evaluation_streams(self.config, self.plugins, self.tokenizer)

    @cached_property
    def algorithm(self) -> Algorithm:
        return load_algorithm(self.config, self.plugins)

    @cached_property
    def reward(self) -> Reward:
        return self._find(Reward, self.config.reward.name, "reward.name")

    def _find(self, kind: type[_Entry], name: str, field_name: str) -> _Entry:
        return self.plugins.find(kind, name, field_name=field_name)


def _load(entry: Registration, field_name: str) -> None:
    try:
        entry.load()
    except PluginError as error:
        raise PluginError(f"{field_name}: {error.message}", remedy=error.remedy, code=error.code) from error
