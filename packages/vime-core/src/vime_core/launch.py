"""Launchers: where the trainer ranks and the engines of a run live. Built in: everything on this machine, inline."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from vime_core.alignment import Alignment
from vime_core.backends import Rollout, RolloutContext, Trainer, TrainerContext
from vime_core.config.schema import RunConfig
from vime_core.determinism.environment import apply, role_environment
from vime_core.determinism.policy import DeterminismPolicy
from vime_core.errors import ConfigError
from vime_core.plugins.manager import PluginManager
from vime_core.plugins.types import Options, RolloutEngine, TrainerBackend


class Launcher(Protocol):
    """Starts the two sides of a run."""

    def prepare(self) -> None:
        """Set the driver's environment; called before anything heavy is imported."""
        ...

    def require_room(self) -> None:
        """Raise VimeError when ranks or engines are more than this launcher can hold; starts nothing."""
        ...

    def rollout(self, model_directory: Path, alignment: Alignment | None) -> Rollout: ...

    def trainer(self, model_directory: Path, alignment: Alignment | None) -> Trainer: ...

    def close(self) -> None:
        """Give back what both sides shared, after they are closed. Idempotent."""
        ...


class InlineLauncher:
    """Driver and one trainer rank in this process; the engine in its own processes, as it starts them."""

    def __init__(self, config: RunConfig, policy: DeterminismPolicy, plugins: PluginManager) -> None:
        self._config = config
        self._policy = policy
        self._plugins = plugins

    def prepare(self) -> None:
        for role in ("driver", "trainer"):
            apply(role_environment(self._config, self._policy, role))

    def require_room(self) -> None:
        """Raise ConfigError for more than one rank or one engine."""
        options, engines = self._config.options("trainer", self._config.trainer.backend), self._config.rollout.engines
        if isinstance(options, Options) and options.ranks > 1:
            raise _too_many(f"[trainer.{self._config.trainer.backend}] asks for {options.ranks} ranks")
        if engines > 1:
            raise _too_many(f"rollout.engines = {engines}")

    def rollout(self, model_directory: Path, alignment: Alignment | None) -> Rollout:
        name = self._config.rollout.backend
        entry = self._plugins.find(RolloutEngine, name, field_name="rollout.backend")
        options = self._config.options("rollout", name)
        return entry.load()(RolloutContext(self._config, options, self._policy, model_directory, alignment))

    def trainer(self, model_directory: Path, alignment: Alignment | None) -> Trainer:
        name = self._config.trainer.backend
        entry = self._plugins.find(TrainerBackend, name, field_name="trainer.backend")
        options = self._config.options("trainer", name)
        return entry.load()(TrainerContext(self._config, options, self._policy, model_directory, alignment))

    def close(self) -> None:
        """Nothing is shared."""


def _too_many(what: str) -> ConfigError:
    return ConfigError(
        f"{what}, and run.launcher = 'inline' holds one of each",
        remedy="Set run.launcher = 'ray', or ask for one.",
        code="VIME-CONFIG-056",
    )
