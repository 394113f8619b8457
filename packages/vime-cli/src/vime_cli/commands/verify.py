"""``vime verify``: separate, bitwise verdicts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from vime_cli.arguments import Json, Set
from vime_cli.output import print_json
from vime_core.errors import BackendError, ConfigError

app = typer.Typer(help="Verdicts: does what was promised hold, bit for bit?", no_args_is_help=True)


@app.callback()
def _group() -> None:  # pyright: ignore[reportUnusedFunction]
    """Keep the verdicts subcommands while there is only one."""


@app.command("repeat")
def repeat(
    inputs: Annotated[
        list[Path], typer.Argument(help="TOML files to run twice, or two run records.", show_default=False)
    ],
    overrides: Set = None,
    directory: Annotated[
        Path | None, typer.Option("--directory", help="Where the two records go; must not exist.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Is the same run twice the same, bit for bit?

    Give a configuration to run it twice in fresh processes, or two records to compare.
    Exit code 0: holds. 1: does not hold. 3: could not be checked.
    """
    from vime_core.verify.repeat import verify_repeat

    from vime_core.record.reader import RunRecord

    if overrides and _are_records(inputs):
        raise ConfigError(
            "--set is given with two run records", remedy="Leave it out, or name a TOML file.", code="VIME-CONFIG-008"
        )
    first, second = inputs if _are_records(inputs) else run_twice(inputs, overrides or [], directory, quiet=as_json)
    verdict = verify_repeat(RunRecord.open(first), RunRecord.open(second))
    if as_json:
        print_json({**verdict.as_json(), "records": [str(first), str(second)]})
    else:
        print(f"\n{verdict.sentence}\nRecords: {first} and {second}")
    return verdict.exit_code


def run_twice(files: Sequence[Path], overrides: Sequence[str], directory: Path | None, *, quiet: bool) -> list[Path]:
    """Run a configuration twice in fresh processes and return the two record directories."""
    from vime_core.config.load import load_config

    config, _ = load_config(files, overrides)
    parent = directory or _free_directory(config.run.output)
    if parent.exists():
        raise ConfigError(
            f"--directory {str(parent)!r} exists", remedy="Name one that does not exist.", code="VIME-CONFIG-009"
        )
    records = [parent / "first", parent / "second"]
    for record in records:
        print(f"Running {' '.join(map(str, files))} into {record}", file=sys.stderr)
        _run_once(files, overrides, record, quiet=quiet)
    return records


def _run_once(files: Sequence[Path], overrides: Sequence[str], record: Path, *, quiet: bool) -> None:
    sets = [part for override in overrides for part in ("--set", override)]
    command = [sys.executable, "-m", "vime_cli", "run", *map(str, files), *sets, "--output", str(record)]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE if quiet else None, text=True)
    if done.returncode:
        raise BackendError(
            f"the run into {str(record)!r} ended with exit code {done.returncode}{_shown(done.stderr)}",
            remedy="Its own error stands above; `vime run` with the same arguments shows it alone.",
            code="VIME-BACKEND-001",
        )


def _shown(stderr: str | None) -> str:
    return f":\n{stderr}" if stderr else ""


def _are_records(inputs: Sequence[Path]) -> bool:
    return len(inputs) == 2 and all((path / "manifest.json").is_file() or path.is_dir() for path in inputs)


def _free_directory(output: Path) -> Path:
    number = 1
    while (candidate := output.with_name(f"{output.name}-repeat-{number:03d}")).exists():
        number += 1
    os.makedirs(candidate.parent, exist_ok=True)
    return candidate
