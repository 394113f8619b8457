"""``vime run``: one RL run, recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vime_cli.arguments import Configs, Json, Set
from vime_cli.output import print_json


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

    extra = [f'run.output="{output}"'] if output else []
    quiet = ['run.sinks=["jsonl"]'] if as_json else []
    config, plugins = load_config(configs, [*(overrides or []), *extra, *quiet])
    if dry_run:
        return _print_resolved(config, as_json=as_json)
    from vime_core.loop.run import execute

    summary = execute(config, plugins)
    if as_json:
        print_json(summary.as_json())
    else:
        print(summary.sentence())
    return 0


def _print_resolved(config: object, *, as_json: bool) -> int:
    import tomlkit

    from vime_core.config.load import resolved_table
    from vime_core.config.schema import RunConfig

    assert isinstance(config, RunConfig)
    table = resolved_table(config)
    if as_json:
        print_json(table)
    else:
        print(tomlkit.dumps(table), end="")
    return 0
