"""Write the reference part of docs/configuration.md from the schema and the installed plugins' options."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from vime_core.config.load import SELECTORS
from vime_core.config.schema import RunConfig
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
        yield f"| `{name}` | {_type(field)} | {_default(field)} | {field.description or ''} |"
    yield ""


def _type(field: FieldInfo) -> str:
    text = getattr(field.annotation, "__name__", "") if isinstance(field.annotation, type) else str(field.annotation)
    for noise in ("typing.", "pathlib.", "collections.abc."):
        text = text.replace(noise, "")
    return f"`{text}`".replace("|", "\\|")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return f"`{value!r}`" if not isinstance(value, Path) else f"`{str(value)!r}`"


if __name__ == "__main__":
    main()
