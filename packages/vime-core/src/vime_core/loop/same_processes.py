"""What decides bits in a resumed run's processes must be what it was when the run began."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from vime_core.alignment import CONTRACT_SETTINGS
from vime_core.errors import ConfigError
from vime_core.record.schema import ProcessEntry

_SETTINGS: Final = (*CONTRACT_SETTINGS, "attention_backends", "model_runner")
_OF_GPUS: Final = ("gpu", "capability", "device", "cuda")
_OF_CPUS: Final = ("cpu", "cpu_capability", "threads")
"""Hardware and settings that say which arithmetic runs; on a GPU's host the processor computes no number."""
_PLACES: Final = ("_VISIBLE_DEVICES", "_HOME", "_PATH", "_DIR", "_ROOT", "_FILE", "_IP", "_PORT", "_IFNAME")
_TALK: Final = ("_LEVEL", "_DEBUG", "_LOGS")
"""Ends of variables that say where something is or how much is told."""


def require_same_processes(began: Sequence[ProcessEntry], now: Sequence[ProcessEntry]) -> None:
    """Versions, variables, provider and processors of a run that promises the same bits, process by process.

    Args:
        began: what a record says of the run's first processes; empty: it never had both sides open.
        now: what they report after a resume.

    Raises:
        ConfigError: one of them is another, or there are more or fewer processes.
    """
    if not began:
        return
    if len(began) != len(now):
        raise _refused(f"{len(began)} processes", f"{len(now)}")
    hardware = _OF_GPUS if any(_on_gpu(process) for process in (*began, *now)) else _OF_CPUS
    for one, other in zip(began, now, strict=True):
        if found := next(_differences(_deciding(one, hardware), _deciding(other, hardware)), None):
            name, was, present = found
            raise _refused(f"{name} {was} in {one.role} {one.rank}", present)


def _on_gpu(process: ProcessEntry) -> bool:
    return bool(process.hardware.get("gpu")) or process.hardware.get("device", "cpu") != "cpu"


def _deciding(process: ProcessEntry, hardware: Sequence[str]) -> dict[str, Any]:
    """By its name in words."""
    told, variables = {**process.settings, **process.hardware}, process.environment.items()
    return {
        "role": process.role,
        "rank": process.rank,
        **process.versions,
        **{f"variable {name}": value for name, value in variables if not name.endswith(_PLACES + _TALK)},
        **{name: told[name] for name in (*_SETTINGS, *hardware) if name in told},
    }


def _differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    for name in {**was, **now}:
        pair = [repr(side[name]) if name in side else "absent" for side in (was, now)]
        if pair[0] != pair[1]:
            yield name, pair[0], pair[1]


def _refused(recorded: str, present: str) -> ConfigError:
    return ConfigError(
        f"the run was recorded with {recorded}, and this is {present}",
        remedy="Resume with the software, the variables and the kind of processor that the run began with, or start a"
        " new run: the steps that are left would have other bits.",
        code="VIME-CONFIG-017",
    )
