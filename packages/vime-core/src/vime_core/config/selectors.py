"""Keys whose values name plugins, and with them the plugins' own tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vime_core.config.schema import RunConfig
from vime_core.errors import ConfigError
from vime_core.plugins.manager import PluginManager
from vime_core.plugins.types import (
    AdvantageEstimator,
    DatasetSource,
    LauncherEntry,
    Loss,
    ModelSource,
    Registration,
    Reward,
    RolloutEngine,
    TrainerBackend,
)


@dataclass(frozen=True)
class Selector:
    """A key whose value names a plugin; the plugin's table stands in the same section."""

    section: str
    key: str
    kind: type[Registration]


SELECTORS = (
    Selector("run", "launcher", LauncherEntry),
    Selector("model", "source", ModelSource),
    Selector("data", "source", DatasetSource),
    Selector("evaluation", "source", DatasetSource),
    Selector("reward", "name", Reward),
    Selector("algorithm", "advantage", AdvantageEstimator),
    Selector("algorithm", "loss", Loss),
    Selector("rollout", "backend", RolloutEngine),
    Selector("trainer", "backend", TrainerBackend),
)


def table_names(plugins: PluginManager) -> dict[str, list[str]]:
    """The plugin tables that each section may have."""
    names: dict[str, list[str]] = {}
    for selector in SELECTORS:
        names.setdefault(selector.section, []).extend(entry.name for entry in plugins.of_kind(selector.kind))
    return names


def refuse_unselected(overrides: Sequence[str], config: RunConfig, plugins: PluginManager) -> None:
    """An override of a plugin that the run does not select would change nothing; a file may hold such a table.

    Raises:
        ConfigError: naming the key and what is selected.
    """
    for override in overrides:
        key = override.partition("=")[0].strip()
        section, table = (*key.split("."), "")[:2]
        here = [one for one in SELECTORS if one.section == section]
        selectors = [one for one in here if table in {entry.name for entry in plugins.of_kind(one.kind)}]
        holder: Any = getattr(config, section, None)
        if selectors and table not in holder.plugin_options:
            chosen = " and ".join(f"{section}.{one.key} = {getattr(holder, one.key)!r}" for one in selectors)
            raise ConfigError(
                f"--set {key} would change nothing: {chosen}, not {table!r}",
                remedy=f"Leave it out, or add --set {section}.{selectors[0].key}={table}.",
                code="VIME-CONFIG-074",
            )
