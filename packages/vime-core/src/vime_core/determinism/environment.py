"""Environment variables by role: decided once, applied before heavy imports, read back afterwards."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager

from vime_core.config.schema import RunConfig
from vime_core.determinism.policy import DeterminismPolicy
from vime_core.types import Role


def role_environment(config: RunConfig, policy: DeterminismPolicy, role: Role) -> dict[str, str]:
    """The variables that a process of this role needs: the policy's, and the configured CPU threads."""
    environment = dict(policy.role(role).environment)
    threads = {"trainer": config.trainer.threads, "rollout": config.rollout.threads, "driver": None}[role]
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    return environment


def apply(wanted: Mapping[str, str]) -> None:
    """Set the variables in this process; call before torch is imported."""
    os.environ.update(wanted)


@contextmanager
def exactly(wanted: Mapping[str, str], removed: Iterable[str] = ()) -> Generator[None]:
    """The environment that a child process is started with; this process's own is restored afterwards."""
    before = dict(os.environ)
    try:
        for name in removed:
            os.environ.pop(name, None)
        os.environ.update(wanted)
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def read_back(names: Iterable[str]) -> dict[str, str]:
    """The effective values of variables in this process; an unset one is the empty string."""
    return {name: os.environ.get(name, "") for name in names}
