"""``vime verify resume``: one run in one go, one killed and resumed, compared bit by bit."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from vime_cli.arguments import Configs, Json, Set
from vime_cli.children import set_options
from vime_cli.commands.places import new_directory
from vime_cli.output import print_json
from vime_cli.signals import PARENT
from vime_core.errors import BackendError, ConfigError

if TYPE_CHECKING:
    from vime_core.verify.verdict import Verdict

POLL_S: Final = 0.01
STEPS: Final = 8
KILL_AFTER: Final = 3


def resume(
    files: Configs,
    overrides: Set = None,
    steps: Annotated[int, typer.Option("--steps", min=2, help="Steps of each run.")] = STEPS,
    kill_after: Annotated[
        int, typer.Option("--kill-after", min=1, help="Kill the second run once so many steps are in a checkpoint.")
    ] = KILL_AFTER,
    directory: Annotated[
        Path | None, typer.Option("--directory", help="Where the two records go; must not exist.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Is a run that was killed (kill -9) and resumed the same, bit for bit, as one that was never stopped?

    Exit code 0: holds. 1: does not hold. 3: could not be checked.
    """
    verdict, records = check_resume(files, overrides or [], steps, kill_after, directory)
    if as_json:
        print_json({**verdict.as_json(), "records": [str(record) for record in records]})
    else:
        print(f"\n{verdict.sentence}\nRecords: {records[0]} and {records[1]}")
    return verdict.exit_code


def check_resume(
    files: Sequence[Path], overrides: Sequence[str], steps: int, kill_after: int, directory: Path | None
) -> tuple[Verdict, tuple[Path, Path]]:
    """Run, run and kill, resume, compare. Returns the verdict and the two records."""
    from vime_core.config.load import load_config
    from vime_core.record.reader import RunRecord
    from vime_core.verify.resume import verify_resume

    if kill_after >= steps:
        raise ConfigError(
            f"--kill-after {kill_after} leaves nothing of {steps} steps to resume",
            remedy="Kill earlier, or give more --steps.",
            code="VIME-CONFIG-008",
        )
    config, _ = load_config(files, overrides)
    parent = new_directory(config.run.output, directory, "resume")
    whole, killed = parent / "whole", parent / "killed"
    run = [
        "run",
        *map(str, files),
        *set_options([*overrides, f"run.steps={steps}", f"run.checkpoint_every={kill_after}"]),
    ]
    _say(f"Running {' '.join(map(str, files))} into {whole}")
    _require_done(_vime(whole, *run, "--output", str(whole)))
    _say(f"Running it again into {killed}, to be killed after step {kill_after}")
    _kill_when(_vime(killed, *run, "--output", str(killed)), lambda: _checkpointed(killed, kill_after))
    _say(f"Killed. Resuming {killed}")
    verdict = _resume(killed)
    if verdict is None:
        verdict = verify_resume(RunRecord.open(whole), RunRecord.open(killed))
    return verdict, (whole, killed)


@dataclass(frozen=True)
class _Started:
    """A ``vime`` process whose standard error goes to a file: nobody has to read it for the process to go on."""

    process: subprocess.Popen[bytes]
    record: Path
    log: Path

    def wait(self) -> int:
        return self.process.wait()

    def error(self) -> BackendError:
        return BackendError(
            f"the run of {str(self.record)!r} ended with exit code {self.process.returncode}:\n{self.log.read_text()}",
            remedy="Correct what its own error names; `vime run` with the same arguments shows it alone.",
            code="VIME-BACKEND-001",
        )


def _vime(record: Path, *arguments: str) -> _Started:
    resumed = "-resumed" if "--resume" in arguments else ""
    log = record.with_name(f"{record.name}{resumed}.log")
    with log.open("wb") as stream:
        command = [sys.executable, "-m", "vime_cli", *arguments]
        environment = {**os.environ, PARENT: str(os.getpid())}  # it ends when this process does, however that ends
        started = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stream, env=environment)
        return _Started(started, record, log)


def _require_done(started: _Started) -> None:
    if started.wait():
        raise started.error()


def _kill_when(started: _Started, due: Callable[[], bool]) -> None:
    """SIGKILL, which no process can catch, as soon as ``due``."""
    while started.process.poll() is None and not due():
        time.sleep(POLL_S)
    if started.process.poll() is None:
        started.process.kill()
        started.wait()
        return
    _require_done(started)
    raise BackendError(
        f"the run into {str(started.record)!r} was over before it could be killed",
        remedy="Give more --steps, or a smaller --kill-after.",
        code="VIME-BACKEND-001",
    )


def _checkpointed(record: Path, step: int) -> bool:
    from vime_core.loop.checkpoint import checkpoint_directory

    return checkpoint_directory(record, step).is_dir()


def _resume(record: Path) -> Verdict | None:
    """Resume; a verdict when the resumed run itself found that something is not the same (exit code 1)."""
    from vime_core.verify.resume import NAME
    from vime_core.verify.verdict import Verdict

    started = _vime(record, "run", "--resume", str(record))
    code = started.wait()
    if code not in (0, 1):
        raise started.error()
    if code == 0:
        return None
    lines = started.log.read_text().splitlines()
    said = next((line for line in lines if line.startswith("error ")), lines[-1] if lines else "nothing")
    return Verdict(NAME, False, f"Resume does not hold: the resumed run says {said}.", unequal=1, first="resumed run")


def _say(text: str) -> None:
    print(text, file=sys.stderr)
