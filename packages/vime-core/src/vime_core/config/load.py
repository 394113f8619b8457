"""From TOML files and ``--set`` to a validated `RunConfig`, with errors that say which key and what instead."""

from __future__ import annotations

import errno
import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from vime_core.config.frozen import freeze
from vime_core.config.schema import EvaluationSet, PluginSection, PluginsSection, RunConfig
from vime_core.errors import ConfigError
from vime_core.plugins.manager import PluginManager, PluginSelection
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

Table = dict[str, Any]
_Model = TypeVar("_Model", bound=BaseModel)


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

RENAMED: Mapping[str, str] = {
    "algorithm.advantage_estimator": "algorithm.advantage",
    "algorithm.entropy_coef": "algorithm.ppo-clip.entropy_coefficient",
    "algorithm.eps_clip": "algorithm.ppo-clip.clip_low",
    "algorithm.eps_clip_high": "algorithm.ppo-clip.clip_high",
    "algorithm.kl_loss_coef": "algorithm.ppo-clip.kl_coefficient",
    "rollout.max_model_len": "rollout.context_length",
    "rollout.n_samples_per_prompt": "sampling.samples_per_prompt",
    "rollout.rollout_batch_size": "sampling.prompts_per_step",
    "rollout.temperature": "sampling.temperature",
    "run.num_rollout": "run.steps",
    "run.save_interval": "run.checkpoint_every",
    "sampling.max_new_tokens": "sampling.max_tokens",
    "sampling.n": "sampling.samples_per_prompt",
    "trainer.learning_rate": "trainer.lr",
    "trainer.max_tokens_per_gpu": "trainer.token_budget",
}
"""Names that other frameworks use for our keys: an error that says ours."""


UNSUPPORTED: Mapping[str, str] = {
    "algorithm.critic": "PPO with a critic",
    "algorithm.gae": "PPO with a critic",
    "trainer.critic": "PPO with a critic",
    "rollout.multi_turn": "a rollout of several turns",
    "rollout.max_turns": "a rollout of several turns",
    "sampling.max_turns": "a rollout of several turns",
    "data.image_key": "a multimodal rollout",
    "data.multimodal_keys": "a multimodal rollout",
}
"""What people ask for that is not there: an error that says so."""

UNSUPPORTED_CHOICES: Mapping[str, tuple[tuple[str, ...], str]] = {
    "algorithm.advantage": (("gae", "ppo"), "PPO with a critic"),
}
"""The same of values that a key may have elsewhere."""


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
        _refuse_flat_sections(layer)
        raw = overlay(raw, layer)
    config, plugins = resolve(overlay(raw, last or {}), tuple(file.parent for file in files))
    refuse_unselected(overrides, config, plugins)
    return config, plugins


def resolve(raw: Table, directories: tuple[Path, ...] = ()) -> tuple[RunConfig, PluginManager]:
    """Validate a merged table: plugins first, since they type their own sections."""
    _refuse_renamed(raw)
    _refuse_unsupported(raw)
    plugins = PluginManager.discover(replace(_plugin_selection(raw), directories=directories))
    plugins.require()
    return validate(raw, plugins), plugins


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
    config = _with_options(_validated(RunConfig, table, "", _table_names(plugins)), options)
    return freeze(_with_sets(config, sets))


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


def _table_names(plugins: PluginManager) -> dict[str, list[str]]:
    """The plugin tables that each section may have."""
    names: dict[str, list[str]] = {}
    for selector in SELECTORS:
        names.setdefault(selector.section, []).extend(entry.name for entry in plugins.of_kind(selector.kind))
    return names


def _refuse_internal_key(table: Table) -> None:
    """``plugin_options`` is where validated tables are kept; in a file it is a key like any unknown one."""
    for name, section in table.items():
        if isinstance(section, dict):
            holder = RunConfig.model_fields[name].annotation if name in RunConfig.model_fields else None
            _refuse_filled(cast(Table, section), name, holder)


def _refuse_filled(section: Table, path: str, holder: Any) -> None:
    if "plugin_options" in section:
        raise _unknown_key(f"{path}.plugin_options", "plugin_options", _fields_at(holder, ()))


def _with_options(config: RunConfig, options: Mapping[str, Mapping[str, BaseModel]]) -> RunConfig:
    filled = {
        name: cast(PluginSection, getattr(config, name)).model_copy(update={"plugin_options": chosen})
        for name, chosen in options.items()
    }
    return config.model_copy(update=filled)


def read_toml(file: Path) -> Table:
    """Raises ConfigError naming the file and, for a syntax error, the line."""
    try:
        if file.is_char_device() or file.is_block_device():
            raise OSError(errno.EINVAL, "it is a device")
        with file.open("rb") as stream:
            # With a last line break, what is wrong on the last line has its number.
            return tomllib.loads(stream.read().decode() + "\n")
    except (OSError, ValueError) as error:
        if isinstance(error, tomllib.TOMLDecodeError | UnicodeDecodeError):
            raise _no_toml(file, error) from error
        raise ConfigError(
            f"cannot read configuration {str(file)!r}: {getattr(error, 'strerror', None) or error}",
            remedy=_is_record(file, error) or "Check the path; `configs/` holds ready ones.",
            code="VIME-CONFIG-001",
        ) from error
    except RecursionError as error:
        raise _no_toml(file, error) from error


def _is_record(file: Path, error: Exception) -> str:
    if not (isinstance(error, IsADirectoryError) and (file / "manifest.json").is_file()):
        return ""
    return "That is a run record; give the TOML file of the run instead."


def _no_toml(file: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"{str(file)!r} is not valid TOML: {error}",
        remedy="Correct the line that is named.",
        code="VIME-CONFIG-002",
    )


def parse_override(text: str) -> Table:
    """``trainer.lr=1e-6`` as a nested table. The value is TOML; what is no TOML value is taken as a string."""
    path, separator, value = text.partition("=")
    keys = path.strip().split(".")
    if not separator or not all(keys):
        raise ConfigError(
            f"--set {text!r} is not of the form section.key=value",
            remedy="Write, for example, --set trainer.lr=1e-6",
            code="VIME-CONFIG-003",
        )
    parsed: Any = _toml_value(value.strip())
    for key in reversed(keys):
        parsed = {key: parsed}
    return cast(Table, parsed)


def overlay(base: Mapping[str, Any], top: Mapping[str, Any]) -> Table:
    """``top`` over ``base``: tables merge, everything else is replaced."""
    merged = dict(base)
    for key, value in top.items():
        old = merged.get(key)
        both = isinstance(old, dict) and isinstance(value, dict)
        merged[key] = overlay(cast(Table, old), cast(Table, value)) if both else value
    return merged


def resolved_table(config: RunConfig) -> Table:
    """The configuration as a plain table in the form of a file: `validate` of it gives the same configuration."""
    table = config.model_dump(mode="json", exclude_none=True)
    for section in (*table["evaluation"]["sets"].values(), *table.values()):
        section.update(section.pop("plugin_options", {}))
    return table


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return text


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
    return _validated(entry.options_class(), section.pop(name, {}), f"{selector.section}.{name}")


def _check_other_tables(section: Table, name: str, plugins: PluginManager) -> None:
    """Tables of plugins that are known but not selected, as an overlay leaves them: checked, then left out."""
    for selector in SELECTORS:
        if selector.section == name:
            _check_tables_of(section, selector, plugins)


def _check_tables_of(section: Table, selector: Selector, plugins: PluginManager) -> None:
    for other in plugins.of_kind(selector.kind):
        if other.name in section:
            _plugin_options(section, selector, other.name, plugins)


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


def _plugin_selection(raw: Table) -> PluginSelection:
    section = _validated(PluginsSection, raw.get("plugins", {}), "plugins")
    return PluginSelection(allow=section.allow, disable=section.disable, modules=section.modules)


def _refuse_flat_sections(layer: Table) -> None:
    """Before tables are laid over one another: a layer above or below would hide a section that is no table."""
    for section in RunConfig.model_fields:
        if not isinstance(layer.get(section, {}), dict):
            raise ConfigError(
                f"{section} = {layer[section]!r}: input should be a table",
                remedy=_write_as_table(section),
                code="VIME-CONFIG-007",
            )


def _write_as_table(path: str) -> str:
    return f"Write {path} as a table: [{path}] in the file, or --set {path}.KEY=VALUE."


def _refuse_renamed(raw: Table) -> None:
    for path in _paths(raw):
        if path in RENAMED:
            raise ConfigError(
                f"{path} is called {RENAMED[path]} here",
                remedy=f"Rename the key to {RENAMED[path]}.",
                code="VIME-CONFIG-005",
            )


def _refuse_unsupported(raw: Table) -> None:
    for path in _paths(raw):
        if path in UNSUPPORTED:
            raise _unsupported(path, UNSUPPORTED[path])
    for path, (values, what) in UNSUPPORTED_CHOICES.items():
        section, _, key = path.partition(".")
        value = cast(Table, raw.get(section, {})).get(key)
        if value in values:
            raise _unsupported(f"{path} = {value!r}", what)


def _unsupported(asked: str, what: str) -> ConfigError:
    return ConfigError(
        f"{asked} asks for {what}, which vime does not do",
        remedy="Leave it out; docs/algorithms.md lists what there is.",
        code="VIME-CONFIG-019",
    )


def _paths(table: Table, prefix: str = "") -> Iterable[str]:
    for key, value in table.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _paths(cast(Table, value), f"{prefix}{key}.")


def _validated(
    model: type[_Model], table: Any, prefix: str, tables: Mapping[str, Sequence[str]] | None = None
) -> _Model:
    try:
        # As JSON, strictly: lists may be tuples and strings paths, but true is no 1 and "3" no number.
        return model.model_validate_json(json.dumps(table, default=_refuse_date), strict=True)
    except ValidationError as error:
        raise _explain(error, model, prefix, tables or {}) from error


def _refuse_date(value: object) -> str:
    raise ConfigError(
        f"the configuration holds the {type(value).__name__} {value}, and no key takes one",
        remedy="Put it into quotes.",
        code="VIME-CONFIG-007",
    )


def _explain(
    error: ValidationError, model: type[BaseModel], prefix: str, tables: Mapping[str, Sequence[str]]
) -> ConfigError:
    """KEY = VALUE: the value has the wrong type, lies out of range, or is none of those that the key takes."""
    first = error.errors()[0]
    path = ".".join([*([prefix] if prefix else []), *(str(part) for part in first["loc"])])
    if first["type"] == "extra_forbidden":
        known = _fields_at(model, first["loc"][:-1])
        in_section = tables.get(str(first["loc"][0]), ()) if len(first["loc"]) == 2 else ()
        return _unknown_key(path, str(first["loc"][-1]), [*known, *in_section])
    rest = len(error.errors()) - 1
    more = f" ({rest} more of the kind)" if rest else ""
    return ConfigError(_message(first, path) + more, remedy=_remedy(first, path), code="VIME-CONFIG-007")


def _message(detail: ErrorDetails, path: str) -> str:
    if detail["type"] == "missing":
        return f"{path} is required but not set"
    if detail["type"] == "value_error":
        text = detail["msg"].removeprefix("Value error, ")
        return text if isinstance(detail["input"], dict) else f"{path}: {text}"
    said = detail["msg"].replace("valid tuple", "valid array").replace("an object", "a table")
    return f"{path} = {detail['input']!r}: {said[0].lower()}{said[1:]}"


def _remedy(detail: ErrorDetails, path: str) -> str:
    if detail["type"] == "value_error":
        return "Change one of the named keys." if isinstance(detail["input"], dict) else f"Correct {path}."
    if detail["type"] == "missing" and "." not in path:
        return f"Write a table [{path}] into the file; docs/configuration.md lists its keys."
    if detail["type"] in ("model_type", "dict_type", "model_attributes_type"):
        return _write_as_table(path)
    if detail["type"] == "tuple_type":
        return f"""Correct {path} in the file, or give a list: --set '{path}=["..."]'."""
    return f"Correct {path} in the file, or give --set {path}=VALUE."


def _unknown_key(path: str, key: str, known: Sequence[str]) -> ConfigError:
    close = get_close_matches(key, known, n=1)
    hint = f"Did you mean {path.removesuffix(key)}{close[0]}? " if close else ""
    return ConfigError(
        f"unknown key {path}",
        remedy=f"{hint}Known keys there: {', '.join(known) or 'none'}.",
        code="VIME-CONFIG-004",
    )


def _annotation_at(holder: Any, part: int | str) -> Any:
    """Of a model's field, or of what a mapping holds."""
    if fields := getattr(holder, "model_fields", None):
        return fields[part].annotation if part in fields else None
    return get_args(holder)[-1] if get_args(holder) else None


def _fields_at(model: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    current: Any = model
    for part in location:
        current = _annotation_at(current, part)
    fields: Mapping[str, Any] = getattr(current, "model_fields", {})
    return [name for name in fields if name != "plugin_options"]
