"""The launcher ``ray``: reserve, start the actors in the environment of their role, and give both sides to the loop."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Final, cast

from vime_core.alignment import Alignment
from vime_core.backends import Ranks, Rollout, RolloutContext, Trainer, TrainerContext
from vime_core.config.schema import RunConfig
from vime_core.determinism.environment import apply, role_environment
from vime_core.determinism.policy import DeterminismPolicy
from vime_core.errors import PolicyError
from vime_core.plugins.manager import PluginManager
from vime_core.plugins.types import Options, RolloutEngine, TrainerBackend
from vime_core.ray.cluster import Cluster, Demand, require_room
from vime_core.ray.crew import Crew, Member, gather
from vime_core.ray.hosts import EngineHost, Host, Place, TrainerHost
from vime_core.ray.library import ray, require_ray
from vime_core.ray.options import RayOptions
from vime_core.ray.rollout import AlignedRayRollout, RayRollout
from vime_core.ray.trainer import ray_trainer
from vime_core.types import Role


class RayLauncher:
    """A `vime_core.launch.Launcher`."""

    def __init__(self, config: RunConfig, policy: DeterminismPolicy, plugins: PluginManager) -> None:
        self._config = config
        self._policy = policy
        self._plugins = plugins
        self._options = cast("RayOptions", config.options("run", "ray"))

    def prepare(self) -> None:
        """Set the driver's environment; the other roles' are their actors'."""
        apply(role_environment(self._config, self._policy, "driver"))

    def require_room(self) -> None:
        """See `vime_core.launch.Launcher`. What another machine's cluster has is asked when it is joined.

        Raises:
            PluginError: Ray is not installed.
            PolicyError: ``run.ray.env_vars`` contradicts what a role needs.
            ConfigError: this machine has fewer CPUs than the actors reserve.
        """
        require_ray()
        _ = self._environment("trainer"), self._environment("rollout")
        if not self._options.address:
            cpus = float(len(os.sched_getaffinity(0)))
            require_room([_of("CPU", one) for one in self._demands({})], {"CPU": cpus}, "this machine")

    def rollout(self, model_directory: Path, alignment: Alignment | None) -> Rollout:
        """Start every engine."""
        name, config = self._config.rollout.backend, self._shipped
        entry = self._plugins.find(RolloutEngine, name, field_name="rollout.backend")
        crew = self._crew(EngineHost, "rollout", config.rollout.engines)
        options, place = config.options("rollout", name), model_directory.absolute()
        context = RolloutContext(config, options, self._policy, place, alignment)
        contexts = [replace(context, engine=number) for number in range(config.rollout.engines)]
        self._open(crew, [(entry.target, name, one) for one in contexts])
        return RayRollout(crew) if alignment is None else AlignedRayRollout(crew)

    def trainer(self, model_directory: Path, alignment: Alignment | None) -> Trainer:
        """Start every rank."""
        name, config = self._config.trainer.backend, self._shipped
        entry = self._plugins.find(TrainerBackend, name, field_name="trainer.backend")
        crew = self._crew(TrainerHost, "trainer", self._ranks)
        options, place = config.options("trainer", name), model_directory.absolute()
        context = TrainerContext(config, options, self._policy, place, alignment)
        meeting = crew.one(0, "free_address") if self._ranks > 1 else ""
        ranks = [Ranks(rank, self._ranks, 0, meeting) for rank in range(self._ranks)]
        can = self._open(crew, [(entry.target, name, context, one) for one in ranks])[0]
        return ray_trainer(crew, can)

    def close(self) -> None:
        """Leave the cluster; end it where it is the run's own."""
        if "_reserved" in vars(self):
            self._reserved[0].close()
            del self._reserved

    @property
    def _shipped(self) -> RunConfig:
        """The configuration for processes with another working directory."""
        run = self._config.run
        return self._config.model_copy(update={"run": run.model_copy(update={"output": run.output.absolute()})})

    @property
    def _ranks(self) -> int:
        return _size(self._config, "trainer", self._config.trainer.backend)

    @cached_property
    def _reserved(self) -> tuple[Cluster, Any]:
        """The cluster, and the placement group with the ranks' bundles before the engines'."""
        cluster = Cluster(self._options)
        try:
            return cluster, cluster.reserve(self._demands(cluster.resources))
        except BaseException:
            cluster.close()
            raise

    def _demands(self, present: Mapping[str, float]) -> list[Demand]:
        options, gpus = self._options, present.get("GPU", 0.0) > 0
        size = _size(self._config, "rollout", self._config.rollout.backend)
        rank = _bundle(options.cpus_per_rank, options.gpus_per_rank, 1.0 if gpus else 0.0)
        engine = _bundle(options.cpus_per_engine, options.gpus_per_engine, float(size) if gpus else 0.0)
        return [
            *(Demand(_name("trainer", number), rank) for number in range(self._ranks)),
            *(Demand(_name("rollout", number), engine) for number in range(self._config.rollout.engines)),
        ]

    def _crew(self, host: type[Host], role: Role, count: int) -> Crew:
        cluster, group = self._reserved
        demands = self._demands(cluster.resources)
        actor, environment = ray().remote(host), {"env_vars": self._environment(role)}
        scheduling: Any = import_module("ray.util.scheduling_strategies")
        handles: list[Any] = []
        for number in range(count):
            bundle = number + (self._ranks if role == "rollout" else 0)
            resources = demands[bundle].resources
            strategy = scheduling.PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
            chosen = actor.options(
                num_cpus=resources["CPU"],
                num_gpus=resources.get("GPU", 0.0),
                runtime_env=environment,
                scheduling_strategy=strategy,
            )
            handles.append(chosen.remote())
        return _members(handles, role)

    def _open(self, crew: Crew, arguments: list[tuple[Any, ...]]) -> list[Any]:
        try:
            return crew.calls("open", arguments)
        except BaseException:
            crew.close()
            raise

    def _environment(self, role: Role) -> dict[str, str]:
        wanted = role_environment(self._config, self._policy, role)
        for name, value in self._options.env_vars.items():
            if wanted.get(name, value) != value:
                raise PolicyError(
                    f"run.ray.env_vars sets {name} = {value!r}, but the {role} process needs {wanted[name]!r}",
                    remedy=f"Leave {name} out of run.ray.env_vars, or choose another run.policy.",
                    code="VIME-ENV-008",
                )
        more = self._options.env_vars.get("PYTHONPATH", ""), os.environ.get("PYTHONPATH", "")
        paths = filter(None, [*map(str, self._plugins.module_directories), *more])
        return {**self._options.env_vars, **wanted, "PYTHONPATH": os.pathsep.join(paths)}


_UNKNOWN: Final = Place("unknown", "", 0, (), Path("/nonexistent"))


def _members(handles: list[Any], role: Role) -> Crew:
    named = [(handle, _name(role, number)) for number, handle in enumerate(handles)]
    unplaced = [Member(handle, name, _UNKNOWN) for handle, name in named]
    try:
        places = gather("start", [(member, member.handle.place.remote()) for member in unplaced])
    except BaseException:
        for handle in handles:
            ray().kill(handle)
        raise
    return Crew([Member(handle, name, place) for (handle, name), place in zip(named, places, strict=True)])


def _name(role: Role, number: int) -> str:
    return f"trainer rank {number}" if role == "trainer" else f"engine {number}"


def _size(config: RunConfig, section: str, plugin: str) -> int:
    options = config.options(section, plugin)
    return options.ranks if isinstance(options, Options) else 1


def _bundle(cpus: float, gpus: float | None, usual_gpus: float) -> dict[str, float]:
    wanted = usual_gpus if gpus is None else gpus
    return {"CPU": cpus, **({"GPU": wanted} if wanted else {})}


def _of(name: str, demand: Demand) -> Demand:
    return Demand(demand.who, {name: demand.resources[name]})
