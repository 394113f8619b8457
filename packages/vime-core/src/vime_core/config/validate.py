"""From a merged table to a `RunConfig`, with the options of the plugins that the table selects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from pydantic import BaseModel

from vime_core.config.explain import fields_at, unknown_key, validated
from vime_core.config.frozen import freeze
from vime_core.config.layers import Table
from vime_core.config.schema import EvaluationSet, PluginSection, RunConfig
from vime_core.config.selectors import SELECTORS, Selector, table_names
from vime_core.plugins.manager import PluginManager
from vime_core.plugins.types import DatasetSource


def validate(raw: Mapping[str, Any], plugins: PluginManager) -> RunConfig:
    """Validate a merged table against the schema and against the options of the plugins that it selects."""
    table: Table = {key: dict(cast(Table, value)) if isinstance(value, dict) else value for key, value in raw.items()}
    _refuse_internal_key(table)
    options: dict[str, dict[str, BaseModel]] = {}
    for selector in SELECTORS:
        section = (
            table.setdefault(selector.section, {}) if _has_defaults(selector.section) else table.get(selector.section)
        )
        if isinstance(section, dict):
            name = _selected(cast(Table, section), selector)
            if name:
                options.setdefault(selector.section, {})[name] = _plugin_options(
                    cast(Table, section), selector, name, plugins
                )
    for section in options:
        _check_other_tables(table[section], section, plugins)
    sets = _evaluation_sets(table, plugins)
    config = _with_options(validated(RunConfig, table, "", table_names(plugins)), options)
    return freeze(_with_sets(config, sets))


def resolved_table(config: RunConfig) -> Table:
    """The configuration as a plain table in the form of a file: `validate` of it gives the same configuration."""
    table = config.model_dump(mode="json", exclude_none=True)
    for section in (*table["evaluation"]["sets"].values(), *table.values()):
        section.update(section.pop("plugin_options", {}))
    return table


def _evaluation_sets(table: Table, plugins: PluginManager) -> dict[str, dict[str, BaseModel]]:
    """The options of each evaluation set's source, by set and source; their tables are taken out of ``table``."""
    section = cast(Table, table.get("evaluation", {}))
    if not isinstance(section.get("sets", {}), dict):
        return {}
    options: dict[str, dict[str, BaseModel]] = {}
    section["sets"] = sets = dict(cast(Table, section.get("sets", {})))
    for name, given in sets.items():
        source = cast(Table, given).get("source") if isinstance(given, dict) else None
        if isinstance(source, str):
            sets[name] = one = dict(cast(Table, given))
            selector = Selector(f"evaluation.sets.{name}", "source", DatasetSource)
            _refuse_filled(one, selector.section, EvaluationSet)
            options[name] = {source: _plugin_options(one, selector, source, plugins)}
            _check_tables_of(one, selector, plugins)
    return options


def _with_sets(config: RunConfig, options: Mapping[str, Mapping[str, BaseModel]]) -> RunConfig:
    sets = {
        name: one.model_copy(update={"plugin_options": options[name]}) for name, one in config.evaluation.sets.items()
    }
    return config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"sets": sets})})


def _with_options(config: RunConfig, options: Mapping[str, Mapping[str, BaseModel]]) -> RunConfig:
    filled = {
        name: cast(PluginSection, getattr(config, name)).model_copy(update={"plugin_options": chosen})
        for name, chosen in options.items()
    }
    return config.model_copy(update=filled)


def _has_defaults(section: str) -> bool:
    return not RunConfig.model_fields[section].is_required()


def _selected(section: Table, selector: Selector) -> str:
    holder = cast(type[PluginSection], RunConfig.model_fields[selector.section].annotation)
    default = holder.model_fields[selector.key].get_default()
    name = section.get(selector.key, default)
    return name if isinstance(name, str) else ""


def _plugin_options(section: Table, selector: Selector, name: str, plugins: PluginManager) -> BaseModel:
    where = f"{selector.section}.{selector.key}"
    entry = plugins.find(selector.kind, name, field_name=where)
    return validated(entry.options_class(), section.pop(name, {}), f"{selector.section}.{name}")


def _check_other_tables(section: Table, name: str, plugins: PluginManager) -> None:
    """Tables of plugins that are known but not selected, as an overlay leaves them: checked, then left out."""
    for selector in SELECTORS:
        if selector.section == name:
            _check_tables_of(section, selector, plugins)


def _check_tables_of(section: Table, selector: Selector, plugins: PluginManager) -> None:
    for other in plugins.of_kind(selector.kind):
        if other.name in section:
            _plugin_options(section, selector, other.name, plugins)


def _refuse_internal_key(table: Table) -> None:
    """``plugin_options`` is where validated tables are kept; in a file it is a key like any unknown one."""
    for name, section in table.items():
        if isinstance(section, dict):
            holder = RunConfig.model_fields[name].annotation if name in RunConfig.model_fields else None
            _refuse_filled(cast(Table, section), name, holder)


def _refuse_filled(section: Table, path: str, holder: Any) -> None:
    if "plugin_options" in section:
        raise unknown_key(f"{path}.plugin_options", "plugin_options", fields_at(holder, ()))
