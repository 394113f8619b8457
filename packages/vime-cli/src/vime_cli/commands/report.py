"""``vime report``: a run record as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vime_cli.arguments import Json
from vime_cli.output import print_json


def report(
    run: Annotated[Path, typer.Argument(help="A run record.", show_default=False)],
    output: Annotated[Path | None, typer.Option(help="The file to write; default: RUN.html beside the record.")] = None,
    as_json: Json = False,
) -> int:
    """Write one self-contained HTML page: curves, mismatch, time by phase, environment, and whether it is sound."""
    from vime_core.record.reader import RunRecord
    from vime_core.report.page import write_report

    target = output or run.with_name(f"{run.resolve().name}.html")
    written = write_report(RunRecord.open(run), target)
    if as_json:
        print_json({"report": str(written)})
    else:
        print(written)
    return 0
