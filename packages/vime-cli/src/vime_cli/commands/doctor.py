"""``vime doctor``: what would break the contract on this machine, before any compute is spent."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vime_cli.arguments import Json, Set
from vime_cli.output import print_json


def doctor(
    configs: Annotated[
        list[Path] | None, typer.Argument(help="TOML files of the run in question.", show_default=False)
    ] = None,
    overrides: Set = None,
    as_json: Json = False,
) -> int:
    """Check plugins, environment, packages, model, dataset and reward without starting an engine.

    Exit code 0: a run may start. 1: something forbids it; each finding says what to do. 2: no configuration at all.
    """
    from vime_core.determinism.doctor import examine

    report = examine(configs or [], overrides or [])
    if as_json:
        print_json(report.as_json())
    else:
        print(report.text())
    return 1 if report.errors else 0
