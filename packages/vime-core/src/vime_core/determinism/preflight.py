"""Everything about this machine and configuration that would break the contract, found before compute is spent."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Final, get_args

from vime_core.config.schema import RunConfig
from vime_core.determinism.environment import deciding_environment, role_environment
from vime_core.determinism.policy import DeterminismPolicy
from vime_core.errors import PolicyError
from vime_core.findings import Finding, errors
from vime_core.plugins.types import load_attribute
from vime_core.types import Role

LEAST_FREE_BYTES: Final = 1 << 30


def preflight(config: RunConfig, policy: DeterminismPolicy) -> list[Finding]:
    """All findings for a configuration, errors first."""
    found = [
        *contradictions(config, policy),
        *forbidden(policy),
        *inert(policy),
        *deciding(config, policy),
        *disk(config),
        *probes(config, policy),
    ]
    order = {"error": 0, "warning": 1, "info": 2}
    return sorted(found, key=lambda finding: order[finding.severity])


def require(findings: list[Finding]) -> None:
    """Raise PolicyError for the first finding that forbids a run."""
    for finding in errors(findings):
        raise PolicyError(f"{finding.message} ({finding.cause})", remedy=finding.remedy, code=finding.code)


def contradictions(config: RunConfig, policy: DeterminismPolicy) -> Iterator[Finding]:
    """Variables that are set here to another value than a role of the policy needs."""
    for role in get_args(Role):
        for name, wanted in role_environment(config, policy, role).items():
            found = os.environ.get(name)
            if found is not None and found != wanted:
                yield Finding(
                    "VIME-ENV-001",
                    "error",
                    f"environment variable {name} = {found!r}, but the {role} process needs {wanted!r}",
                    f"policy {policy.id} and the configuration set it, and a variable that is set is never overwritten",
                    f"Unset {name} (or set it to {wanted!r}), or choose another run.policy.",
                )


def forbidden(policy: DeterminismPolicy) -> Iterator[Finding]:
    """Installed packages that a policy forbids."""
    for role in get_args(Role):
        for package in policy.role(role).forbidden_packages:
            if (found := installed_version(package)) is not None:
                yield Finding(
                    "VIME-ENV-002",
                    "error",
                    f"{package} {found} is installed",
                    f"policy {policy.id} forbids it in the {role} process: its kernels are not deterministic",
                    f"Uninstall {package}, or choose another run.policy.",
                )


def inert(policy: DeterminismPolicy) -> Iterator[Finding]:
    """Rules that do nothing here because the package that they steer is absent."""
    for variable, module in policy.inert.items():
        if find_spec(module) is None:
            yield Finding(
                "VIME-ENV-003",
                "info",
                f"{variable} has no effect here",
                f"it steers {module}, which is not installed",
                "Nothing to do; the variable is set all the same.",
            )


def deciding(config: RunConfig, policy: DeterminismPolicy) -> Iterator[Finding]:
    """Variables of the user's that decide bits beyond what the policy sets: the promise holds while they stay."""
    ours = {name for role in get_args(Role) for name in role_environment(config, policy, role)}
    for name, value in deciding_environment().items():
        if name not in ours:
            yield Finding(
                "VIME-ENV-007",
                "info",
                f"environment variable {name} = {value!r} is set",
                "it can decide bits, so it is recorded of both sides, and records of runs without it may differ",
                f"Nothing to do where you want it; else unset {name}.",
            )


def disk(config: RunConfig) -> Iterator[Finding]:
    """Little room where the record goes."""
    try:
        place = _existing_parent(config.run.output)
    except OSError:
        return  # no place at all, which is said where the record is checked
    free = shutil.disk_usage(place).free
    if free < LEAST_FREE_BYTES:
        yield Finding(
            "VIME-ENV-004",
            "warning",
            f"{free / 2**20:.0f} MiB are free at {str(place)!r}",
            "run.output lies there; samples and checkpoints of a run may need more",
            "Free some room, or set run.output to another disk.",
        )


def probes(config: RunConfig, policy: DeterminismPolicy) -> Iterator[Finding]:
    """What the policy's own probes find."""
    for role in get_args(Role):
        for target in policy.role(role).probes:
            yield from load_attribute(target, policy.id)(config)


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _existing_parent(path: Path) -> Path:
    path = path.expanduser().absolute()
    while not path.exists():
        path = path.parent
    return path
