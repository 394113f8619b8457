"""``vime diff``: the first difference between two run records."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vime_cli.arguments import Json
from vime_cli.output import print_json


def diff(
    run_a: Annotated[Path, typer.Argument(help="A run record.", show_default=False)],
    run_b: Annotated[Path, typer.Argument(help="Another run record.", show_default=False)],
    as_json: Json = False,
) -> int:
    """Say in one sentence where two runs first differ.

    Exit code 0: every recorded bit is equal. 1: they differ. 3: nothing could be compared.
    """
    from vime_core.record.reader import RunRecord
    from vime_core.verify.diff import diff_records

    difference = diff_records(RunRecord.open(run_a), RunRecord.open(run_b))
    if as_json:
        print_json({"equal": difference is None, "difference": None if difference is None else difference.as_json()})
    else:
        print("The two records are equal in every digest." if difference is None else difference.sentence)
    return 0 if difference is None else 1
