"""The same configuration twice, each in a process of its own; what a run's exit code says is said by its error."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from vime_cli.children import run_child, set_options
from vime_cli.commands.places import new_directory
from vime_core.errors import BackendError, ConfigError, ContractViolation, RecordError, VimeError


def run_twice(files: Sequence[Path], overrides: Sequence[str], directory: Path | None, *, quiet: bool) -> list[Path]:
    """Run a configuration twice in fresh processes and return the two record directories.

    Raises:
        ContractViolation: a run ended itself with exit code 1, because it found a mismatch within itself.
        ConfigError: a run refused its input (exit code 2).
        BackendError: a run ended in any other way.
    """
    from vime_core.config.load import load_config

    config, _ = load_config(files, overrides)
    parent = new_directory(config.run.output, directory, "repeat")
    records = [parent / "first", parent / "second"]
    for record in records:
        print(f"Running {' '.join(map(str, files))} into {record}", file=sys.stderr)
        _run_once(files, overrides, record, quiet=quiet)
    return records


def _run_once(files: Sequence[Path], overrides: Sequence[str], record: Path, *, quiet: bool) -> None:
    command = [
        sys.executable,
        "-m",
        "vime_cli",
        "run",
        *map(str, files),
        *set_options(overrides),
        "--output",
        str(record),
    ]
    code, said = run_child(command, quiet=quiet)
    if code:
        raise ended(record, code, said)


def ended(record: Path, code: int, stderr: str) -> VimeError:
    """The error of a run that ended with another exit code than 0.

    Args:
        record: of the run, if it came so far.
        code: exit code.
        stderr: what it printed; empty when that was shown already.
    """
    why = _why(record, stderr)
    if code == 1:
        return ContractViolation(
            f"the run into {str(record)!r} found a mismatch within itself and ended{why}",
            remedy="Look at that first: a run that contradicts itself cannot repeat. `vime verify align` looks closer.",
            code="VIME-ALIGN-008",
        )
    if code == 2:
        return ConfigError(
            f"the run into {str(record)!r} refused what it was given{why}",
            remedy="Its own error says what to change; `vime run` with the same arguments shows it alone.",
            code="VIME-CONFIG-019",
        )
    return BackendError(
        f"the run into {str(record)!r} ended with exit code {code}{why}",
        remedy="Its own error stands above; `vime run` with the same arguments shows it alone.",
        code="VIME-BACKEND-001",
    )


def _why(record: Path, stderr: str) -> str:
    """What the run said, or what its record says of its end; one line."""
    from vime_core.record.reader import RunRecord

    try:
        error = RunRecord.open(record).manifest.error
    except RecordError:
        error = stderr.strip()
    return f": {' '.join(error.split())}" if error else ""
