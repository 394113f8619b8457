"""``vime diff``: the first difference between two run records."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vime_cli.arguments import Json
from vime_cli.commands.replay import replay as replay_step
from vime_cli.output import print_json


def diff(
    run_a: Annotated[Path, typer.Argument(help="A run record.", show_default=False)],
    run_b: Annotated[Path, typer.Argument(help="Another run record.", show_default=False)],
    replay: Annotated[
        bool,
        typer.Option("--replay", help="Do the first unequal step of both runs again, with taps."),
    ] = False,
    as_json: Json = False,
) -> int:
    """Say in one sentence where two runs first differ.

    With --replay both configurations run again up to that step, which takes as long as they take.

    Exit code 0: both are complete, and every recorded bit is equal. 1: they differ, or a record contradicts itself. 3:
    nothing was compared, or what was is equal, but a record is not complete. Two records of one
    run are equal in any case, and it is said that they are of one. Of equal ones too it says which versions, sources of
    plugins and settings of processes differ.
    """
    from vime_core.record.reader import RunRecord
    from vime_core.verify.diff import context_differences, diff_records, one_run, unfinished
    from vime_core.verify.difference import some

    records = (RunRecord.open(run_a), RunRecord.open(run_b))
    damage = [f"{record.directory}: {finding}" for record in records for finding in record.check().findings]
    if damage:
        return _print_damage(damage, as_json=as_json)
    difference, rest = diff_records(*records), unfinished(*records)
    same, context = one_run(*records), context_differences(*records)
    replayed = replay_step(records, difference) if replay and difference is not None else None
    if as_json:
        equal = None if rest and difference is None else difference is None
        document = {"equal": equal, "difference": difference and difference.as_json(), "unfinished": rest}
        document |= {"one_run": bool(same), "context": list(context)}
        print_json(document | {"replay": replayed and replayed.as_json()})
    elif difference is not None:
        print(difference.sentence)
        if replay:
            print(replayed.sentence if replayed else "No step can be replayed for this difference.")
    elif rest:
        steps = min(len(record.steps) for record in records)
        print(f"No digest differs in the {steps} steps that both records hold, but {rest}: the rest was not compared.")
    else:
        print("The two records are complete and equal in every digest" + (f", but {same}." if same else "."))
    if difference is None and context and not as_json:
        print(f"These differ, though they are no inputs: {some(context)}.")
    return 1 if difference is not None else 3 if rest else 0


def _print_damage(damage: list[str], *, as_json: bool) -> int:
    if as_json:
        print_json({"equal": False, "difference": None, "damage": damage})
    else:
        print("A record contradicts itself, so its digests say nothing:\n" + "\n".join(damage))
    return 1
