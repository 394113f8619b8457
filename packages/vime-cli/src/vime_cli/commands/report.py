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
    others: Annotated[
        list[Path] | None, typer.Option("--against", help="A record to compare with, bit for bit. Repeatable.")
    ] = None,
    files: Annotated[
        list[Path] | None, typer.Option("--verdicts", help="What vime verify --json printed. Repeatable.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Write one self-contained HTML page: verdicts, curves, mismatch, time by phase, environment, and whether the
    record is sound.
    """
    from vime_core.record.reader import RunRecord
    from vime_core.report.page import write_report
    from vime_core.report.verdicts import against, read_verdicts

    target = output or run.with_name(f"{run.resolve().name}.html")
    record = RunRecord.open(run)
    shown = [against(record, RunRecord.open(other)) for other in others or []]
    shown += [verdict for file in files or [] for verdict in read_verdicts(file)]
    written = write_report(record, target, shown)
    if as_json:
        print_json({"report": str(written)})
    else:
        print(written)
    return 0
