"""From TOML files and ``--set`` to a validated `RunConfig`, with errors that say which key and what instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vime_core.config.explain import validated
from vime_core.config.layers import Table, overlay, parse_override, read_toml, refuse_flat_sections
from vime_core.config.names import refuse_renamed, refuse_unsupported
from vime_core.config.schema import PluginsSection, RunConfig
from vime_core.config.selectors import refuse_unselected
from vime_core.config.validate import validate
from vime_core.plugins.manager import PluginManager, PluginSelection


def load_config(
    files: Sequence[Path], overrides: Sequence[str] = (), last: Mapping[str, Any] | None = None
) -> tuple[RunConfig, PluginManager]:
    """Read TOML files left to right, then ``a.b=value`` overrides, and validate with the plugins they select.

    Args:
        files: TOML files; modules of ``plugins.modules`` are also looked for in their directories.
        overrides: the values of ``--set``.
        last: a table that is laid over all, as a file's.

    Raises:
        ConfigError: a file is missing or no TOML, a key is unknown or renamed, a value has the wrong type.
        PluginError: a selected plugin is missing, broken or in conflict.
    """
    raw: Table = {}
    for layer in (*map(read_toml, files), *map(parse_override, overrides)):
        refuse_flat_sections(layer)
        raw = overlay(raw, layer)
    config, plugins = resolve(overlay(raw, last or {}), tuple(file.parent for file in files))
    refuse_unselected(overrides, config, plugins)
    return config, plugins


def resolve(raw: Table, directories: tuple[Path, ...] = ()) -> tuple[RunConfig, PluginManager]:
    """Validate a merged table: plugins first, since they type their own sections."""
    refuse_renamed(raw)
    refuse_unsupported(raw)
    plugins = PluginManager.discover(replace(_plugin_selection(raw), directories=directories))
    plugins.require()
    return validate(raw, plugins), plugins


def _plugin_selection(raw: Table) -> PluginSelection:
    section = validated(PluginsSection, raw.get("plugins", {}), "plugins")
    return PluginSelection(allow=section.allow, disable=section.disable, modules=section.modules)
