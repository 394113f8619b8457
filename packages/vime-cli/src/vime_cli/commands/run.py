"""``vime run``: one RL run, recorded."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vime_cli.arguments import Configs, Json, Set
from vime_cli.output import print_json

if TYPE_CHECKING:
    from vime_core.config.schema import RunConfig
    from vime_core.plugins.manager import PluginManager


def run(
    configs: Configs,
    overrides: Set = None,
    output: Annotated[Path | None, typer.Option(help="Directory of the run record (run.output).")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and print the resolved configuration.")] = False,
    as_json: Json = False,
) -> int:
    """Train with RL as CONFIGS say, and write a run record.

    Exit code 0: the run is complete. 2: the configuration or the machine does not allow it. 3: a backend failed.
    """
    from vime_core.config.load import load_config

    last: dict[str, dict[str, object]] = {"run": {}}
    if output:
        last["run"]["output"] = str(output)
    if as_json:
        last["run"]["sinks"] = ["jsonl"]
    config, plugins = load_config(configs, overrides or [], last)
    if dry_run:
        _require_ready(config, plugins)
        return _print_resolved(config, as_json=as_json)
    from vime_core.loop.run import execute

    summary = execute(config, plugins)
    if as_json:
        print_json(summary.as_json())
    else:
        print(summary.sentence())
    return 0


def _require_ready(config: RunConfig, plugins: PluginManager) -> None:
    from vime_core.loop.preparation import Preparation
    from vime_core.loop.readiness import require_ready
    from vime_core.loop.sides import load_policy

    for finding in require_ready(Preparation(config, load_policy(config, plugins), plugins)):
        if finding.severity == "warning":
            print(finding, file=sys.stderr)


def _print_resolved(config: RunConfig, *, as_json: bool) -> int:
    import tomlkit

    from vime_core.config.load import resolved_table

    table = resolved_table(config)
    if as_json:
        print_json(table)
    else:
        print(tomlkit.dumps(table), end="")
    return 0
