"""From TOML files and ``--set`` to a validated `RunConfig`, with errors that say which key and what instead."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from vime_core.config.schema import PluginSection, PluginsSection, RunConfig
from vime_core.errors import ConfigError
from vime_core.plugins.manager import PluginManager, PluginSelection
from vime_core.plugins.types import (
    AdvantageEstimator,
    DatasetSource,
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


def load_config(files: Sequence[Path], overrides: Sequence[str] = ()) -> tuple[RunConfig, PluginManager]:
    """Read TOML files left to right, then ``a.b=value`` overrides, and validate with the plugins they select.

    Raises:
        ConfigError: a file is missing or no TOML, a key is unknown or renamed, a value has the wrong type.
        PluginError: a selected plugin is missing, broken or in conflict.
    """
    raw: Table = {}
    for file in files:
        raw = overlay(raw, read_toml(file))
    for override in overrides:
        raw = overlay(raw, parse_override(override))
    return resolve(raw)


def resolve(raw: Table) -> tuple[RunConfig, PluginManager]:
    """Validate a merged table: plugins first, since they type their own sections."""
    _refuse_renamed(raw)
    plugins = PluginManager.discover(_plugin_selection(raw))
    plugins.require()
    return validate(raw, plugins), plugins


def validate(raw: Mapping[str, Any], plugins: PluginManager) -> RunConfig:
    """Validate a merged table against the schema and against the options of the plugins that it selects."""
    table: Table = {key: dict(cast(Table, value)) if isinstance(value, dict) else value for key, value in raw.items()}
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
    for section, chosen in options.items():
        _check_other_tables(table[section], section, plugins)
        table[section]["plugin_options"] = chosen
    return _validated(RunConfig, table, "")


def read_toml(file: Path) -> Table:
    """Raises ConfigError naming the file and, for a syntax error, the line."""
    try:
        with file.open("rb") as stream:
            return tomllib.load(stream)
    except OSError as error:
        raise ConfigError(
            f"cannot read configuration {str(file)!r}: {error.strerror}",
            remedy="Check the path; `configs/` holds ready ones.",
            code="VIME-CONFIG-001",
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{str(file)!r} is not valid TOML: {error}",
            remedy="Correct the line that is named.",
            code="VIME-CONFIG-002",
        ) from error


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
    for section in table.values():
        section.update(section.pop("plugin_options", {}))
    return table


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
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
            for other in plugins.of_kind(selector.kind):
                if other.name in section:
                    _plugin_options(section, selector, other.name, plugins)


def _plugin_selection(raw: Table) -> PluginSelection:
    section = _validated(PluginsSection, raw.get("plugins", {}), "plugins")
    return PluginSelection(allow=section.allow, disable=section.disable, modules=section.modules)


def _refuse_renamed(raw: Table) -> None:
    for path in _paths(raw):
        if path in RENAMED:
            raise ConfigError(
                f"{path} is called {RENAMED[path]} here",
                remedy=f"Rename the key to {RENAMED[path]}.",
                code="VIME-CONFIG-005",
            )


def _paths(table: Table, prefix: str = "") -> Iterable[str]:
    for key, value in table.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _paths(cast(Table, value), f"{prefix}{key}.")


def _validated(model: type[_Model], table: Any, prefix: str) -> _Model:
    try:
        return model.model_validate(table)
    except ValidationError as error:
        raise _explain(error, model, prefix) from error


def _explain(error: ValidationError, model: type[BaseModel], prefix: str) -> ConfigError:
    first = error.errors()[0]
    path = ".".join([*([prefix] if prefix else []), *(str(part) for part in first["loc"])])
    if first["type"] == "extra_forbidden":
        return _unknown_key(path, str(first["loc"][-1]), _fields_at(model, first["loc"][:-1]))
    if first["type"] == "missing":
        message = f"{path} is required but not set"
    elif first["type"] == "value_error":
        message = first["msg"].removeprefix("Value error, ")
    else:
        message = f"{path} = {first['input']!r}: {first['msg'][0].lower()}{first['msg'][1:]}"
    rest = len(error.errors()) - 1
    more = f" ({rest} more of the kind)" if rest else ""
    return ConfigError(message + more, remedy=_remedy(first, path), code="VIME-CONFIG-007")


def _remedy(detail: ErrorDetails, path: str) -> str:
    if detail["type"] == "value_error":
        return "Change one of the named keys."
    return f"Correct {path} in the file, or give --set {path}=VALUE."


def _unknown_key(path: str, key: str, known: Sequence[str]) -> ConfigError:
    close = get_close_matches(key, known, n=1)
    hint = f"Did you mean {path.removesuffix(key)}{close[0]}? " if close else ""
    return ConfigError(
        f"unknown key {path}",
        remedy=f"{hint}Known keys there: {', '.join(known) or 'none'}.",
        code="VIME-CONFIG-004",
    )


def _fields_at(model: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    current: Any = model
    for part in location:
        current = current.model_fields[part].annotation if part in getattr(current, "model_fields", {}) else None
    fields: Mapping[str, Any] = getattr(current, "model_fields", {})
    return [name for name in fields if name != "plugin_options"]
