"""The settings of a recorded run: which decide its bits, and whether they are still those that it began with."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from blake3 import blake3

from vime_core.record.layout import CHECKPOINTS, STATE

if TYPE_CHECKING:
    from vime_core.record.reader import RunRecord

CHANGEABLE: Final = (
    *("run.steps", "run.sinks", "run.checkpoint_every"),
    *("run.ray.address", "run.ray.placement", "run.ray.wait_s"),
)
"""Keys that a resumed run may have otherwise: they decide no bit of a step."""


def settings_digest(config: Mapping[str, Any]) -> str:
    """blake3 of a configuration as JSON with sorted keys and no blanks."""
    return blake3(json.dumps(config, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def deciding(config: Mapping[str, Any]) -> dict[str, Any]:
    """Every setting by its dotted key, but those that a resumed run may change."""
    return {key: value for key, value in _flat(config, "") if key not in CHANGEABLE}


def changed_settings(began: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[str]:
    """Where a configuration is not the one that a run began with, in words.

    Args:
        began: what :func:`deciding` said then.
        config: what is recorded now.
    """
    now = deciding(config)
    for key in {**began, **now}:
        if key not in began:
            yield f"{key} = {json.dumps(now[key])} is new"
        elif key not in now:
            yield f"{key} is gone, and was {json.dumps(began[key])}"
        elif json.dumps(began[key]) != json.dumps(now[key]):
            yield f"{key} is {json.dumps(now[key])}, and was {json.dumps(began[key])}"


def with_changeable(began: Mapping[str, Any], resumed: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The configuration that a run began with, with what a resumed one may have otherwise and has."""
    merged = dict(began)
    for key, value in resumed.items():
        old = merged.get(key)
        if f"{prefix}{key}" in CHANGEABLE:
            merged[key] = value
        elif isinstance(old, Mapping) and isinstance(value, Mapping):
            tables = cast("Mapping[str, Any]", old), cast("Mapping[str, Any]", value)
            merged[key] = with_changeable(*tables, f"{prefix}{key}.")
    return merged


def checkpointed_settings(directory: Path, run_id: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(checkpoint's name, settings) of every checkpoint of a record that can be read and is of its run."""
    for file in sorted((directory / CHECKPOINTS).glob(f"step-*/{STATE}")):
        try:
            state: object = json.loads(file.read_bytes())["state"]
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            continue  # who resumes is told; a checkpoint is no part of what is sealed
        found = cast("Mapping[str, Any]", state if isinstance(state, dict) else {})
        settings: object = found.get("settings")
        if found.get("run_id") == run_id and isinstance(settings, dict):
            yield file.parent.name, cast("Mapping[str, Any]", settings)


def settings_findings(record: RunRecord) -> Iterator[str]:
    """A setting that was changed, by its name where a checkpoint holds what it was; else that there is one."""
    manifest = record.manifest
    for name, settings in checkpointed_settings(record.directory, manifest.run_id):
        if changed := next(changed_settings(settings, manifest.config), ""):
            yield f"manifest: its configuration is not that of {CHECKPOINTS}/{name}: {changed}"
            return
    found = settings_digest(manifest.config)
    if manifest.config_digest and found != manifest.config_digest:
        yield f"manifest: its configuration was changed: the digest is {found}, not {manifest.config_digest}"


def _flat(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(cast("Mapping[str, Any]", value), f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
