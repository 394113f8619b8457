"""Write the reference part of docs/configuration.md from the schema and the installed plugins' options."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from vime_core.config.schema import RunConfig
from vime_core.config.selectors import SELECTORS
from vime_core.plugins.manager import PluginManager

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
MARK = "<!-- written by tools/write_config_reference.py -->"


def main() -> None:
    """Replace what stands below the mark."""
    PAGE.write_text(page(PAGE.read_text()))


def page(text: str) -> str:
    """The whole page with a fresh reference."""
    head, mark, _ = text.partition(MARK)
    if not mark:
        raise SystemExit(f"{PAGE} has no line {MARK}")
    return head + "\n".join([MARK, "", *reference()]) + "\n"


def reference() -> Iterator[str]:
    """Markdown: a heading and a table for each section and for each plugin's own table."""
    plugins = PluginManager.discover()
    for name, field in RunConfig.model_fields.items():
        section: Any = field.annotation
        yield from _table(f"[{name}]", section)
        for selector in SELECTORS:
            if selector.section == name and name != "evaluation":
                for entry in plugins.of_kind(selector.kind):
                    yield from _table(f"[{name}.{entry.name}]", entry.options_class())


def _table(heading: str, model: type[BaseModel]) -> Iterator[str]:
    fields = {name: field for name, field in model.model_fields.items() if name != "plugin_options"}
    if not fields:
        return
    yield from (f"### `{heading}`", "")
    if summary := (model.__doc__ or "").strip().split("\n")[0]:
        yield from (summary, "")
    yield from ("| key | type | default | |", "|---|---|---|---|")
    for name, field in fields.items():
        text = (field.description or "").replace("None:", "unset:")
        yield f"| `{name}` | {_type(field)} | {_default(field)} | {text} |"
    yield ""
    for name, field in fields.items():
        if _is_table(field.annotation):
            yield from _table(f"{heading[:-1]}.{name}]", cast(Any, field.annotation))
        elif get_args(field.annotation) and _is_table(get_args(field.annotation)[-1]):
            yield from _table(f"{heading[:-1]}.{name}.NAME]", get_args(field.annotation)[-1])


def _is_table(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


NAMES: dict[object, str] = {str: "string", bool: "boolean", int: "integer", float: "number", Path: "path"}


def _type(field: FieldInfo) -> str:
    return _bounded(_readable(field.annotation), field.metadata).replace("|", "\\|")


def _readable(annotation: Any) -> str:
    """A type in the words of TOML."""
    if annotation in NAMES:
        return NAMES[annotation]
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _bounded(_readable(arguments[0]), arguments[1:])
    if origin is Literal:
        return " or ".join(f'`"{value}"`' for value in arguments)
    if origin in (Union, UnionType):
        return " or ".join(_readable(part) for part in arguments if part is not type(None))
    if origin is tuple:
        several = [_readable(part) for part in arguments if part is not ...]
        return f"array of {several[0]}s" if ... in arguments else f"[{', '.join(several)}]"
    mapping = isinstance(origin, type) and issubclass(origin, Mapping)
    return "table" if mapping or _is_table(annotation) else "value"


def _bounded(name: str, metadata: Sequence[object]) -> str:
    """With what limits a number: ``number > 0, <= 1``."""
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    parts = [item for holder in metadata for item in (holder.metadata if isinstance(holder, FieldInfo) else [holder])]
    bounds = [f"{sign} {getattr(item, key)}" for item in parts for key, sign in signs.items() if hasattr(item, key)]
    return f"{name} {', '.join(bounds)}" if bounds else name


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "unset"
    if isinstance(value, BaseModel):
        return "see below"
    plain = str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value
    return f"`{json.dumps(plain)}`"


if __name__ == "__main__":
    main()
