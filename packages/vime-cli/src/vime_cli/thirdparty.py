"""Commands that plugins add. Plugins are only looked up when the command is none of our own."""

from __future__ import annotations

from collections.abc import Sequence

import typer


def add_plugin_commands(app: typer.Typer, arguments: Sequence[str]) -> None:
    """Add the commands of installed plugins when the first argument is not built in."""
    if not arguments or arguments[0].startswith("-") or arguments[0] in _built_in(app):
        return
    from vime_core.plugins.manager import PluginManager
    from vime_core.plugins.types import Command

    for command in PluginManager.discover().of_kind(Command):
        if command.name == arguments[0]:
            _add(app, command)


def _add(app: typer.Typer, command: object) -> None:
    from vime_core.plugins.types import Command

    assert isinstance(command, Command)
    target = command.load()
    if isinstance(target, typer.Typer):
        app.add_typer(target, name=command.name)
    else:
        app.command(command.name, help=command.summary)(target)


def _built_in(app: typer.Typer) -> set[str | None]:
    commands = {command.name for command in app.registered_commands}
    return commands | {group.name for group in app.registered_groups}
