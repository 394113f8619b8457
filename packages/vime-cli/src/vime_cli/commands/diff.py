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

    Exit code 0: every recorded bit is equal. 1: they differ, or a record contradicts itself. 3: nothing was compared.
    """
    from vime_core.record.reader import RunRecord
    from vime_core.verify.diff import diff_records

    records = [RunRecord.open(run_a), RunRecord.open(run_b)]
    damage = [f"{record.directory}: {finding}" for record in records for finding in record.check().findings]
    if damage:
        return _print_damage(damage, as_json=as_json)
    difference = diff_records(*records)
    if as_json:
        print_json({"equal": difference is None, "difference": None if difference is None else difference.as_json()})
    else:
        print("The two records are equal in every digest." if difference is None else difference.sentence)
    return 0 if difference is None else 1


def _print_damage(damage: list[str], *, as_json: bool) -> int:
    if as_json:
        print_json({"equal": False, "difference": None, "damage": damage})
    else:
        print("A record contradicts itself, so its digests say nothing:\n" + "\n".join(damage))
    return 1
