"""``vime plugins``: what is installed and what it registers."""

from __future__ import annotations

import typer

from vime_cli.arguments import Json
from vime_cli.output import print_json

app = typer.Typer(help="Installed plugins and what they register.", no_args_is_help=True)


@app.callback()
def _group() -> None:  # pyright: ignore[reportUnusedFunction]
    """Keep ``list`` a subcommand while it is the only one."""


@app.command("list")
def list_plugins(as_json: Json = False) -> int:
    """List plugins with their registrations; broken ones and conflicts are named.

    Exit code 0: all loaded. 1: one is broken, or two are in conflict.
    """
    from vime_core.plugins.manager import PluginManager

    manager = PluginManager.discover()
    if as_json:
        print_json(_document(manager))
    else:
        print(_text(manager))
    return 1 if manager.broken() or manager.conflicts() else 0


def _document(manager: object) -> dict[str, object]:
    from vime_core.plugins.manager import PluginManager

    assert isinstance(manager, PluginManager)
    return {
        "plugins": [
            {"name": i.name, "distribution": i.distribution, "version": i.version, "error": i.error}
            for i in manager.plugins()
        ],
        "registrations": [
            {
                "kind": e.registration.kind,
                "name": e.registration.name,
                "summary": e.registration.summary,
                "plugin": e.plugin.name,
            }
            for e in manager.entries()
        ],
        "conflicts": [error.message for error in manager.conflicts()],
    }


def _text(manager: object) -> str:
    from vime_core.plugins.manager import PluginManager

    assert isinstance(manager, PluginManager)
    lines: list[str] = []
    for info in manager.plugins():
        lines.append(f"{info.name}  ({info.distribution} {info.version})".rstrip())
        if info.error:
            lines.append(f"  broken: {info.error}")
        lines += [
            f"  {e.registration.kind:<13} {e.registration.name:<18} {e.registration.summary}"
            for e in manager.entries()
            if e.plugin.name == info.name
        ]
    lines += [f"conflict: {error.message}" for error in manager.conflicts()]
    return "\n".join(lines)
