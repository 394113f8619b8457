"""``vime verify``: separate, bitwise verdicts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from vime_cli.arguments import Configs, Json, Set
from vime_cli.commands import resume
from vime_cli.commands.places import new_directory
from vime_cli.output import print_json
from vime_core.errors import BackendError, ConfigError

if TYPE_CHECKING:
    from vime_core.verify.verdict import Verdict


class VerdictGroup(TyperGroup):
    """Verdicts of our own, and by any other name a check that a plugin registered."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A name that is none of ours is looked up when its configuration, which selects plugins, is loaded."""
        return super().get_command(ctx, cmd_name) or _plugin_check(cmd_name)


app = typer.Typer(
    cls=VerdictGroup,
    help="Verdicts: does what was promised hold, bit for bit?",
    epilog="A check that a plugin registers runs as `vime verify NAME CONFIG`; `vime plugins list` names them.",
    no_args_is_help=True,
)

Samples = Annotated[
    int, typer.Option("--samples", min=0, help="Requests of the run to compare; 0: those of its first step.")
]
Updates = Annotated[int, typer.Option("--updates", min=1, help="Optimizer steps, each compared after its update.")]


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
    if overrides and _are_records(inputs):
        raise ConfigError(
            "--set is given with two run records", remedy="Leave it out, or name a TOML file.", code="VIME-CONFIG-008"
        )
    first, second = inputs if _are_records(inputs) else run_twice(inputs, overrides or [], directory, quiet=as_json)
    verdict = _compare_records(first, second)
    if as_json:
        print_json({**verdict.as_json(), "records": [str(first), str(second)]})
    else:
        print(f"\n{verdict.sentence}\nRecords: {first} and {second}")
    return verdict.exit_code


app.command("resume")(resume.resume)


@app.command("align")
def align(
    files: Configs,
    overrides: Set = None,
    layers: Annotated[bool, typer.Option("--layers", help="Compare every tap of every layer too.")] = False,
    samples: Samples = 0,
    updates: Updates = 2,
    longest: Annotated[
        int, typer.Option("--longest", min=0, help="Tokens of the longest sequence; 0: rollout.context_length.")
    ] = 0,
    lr: Annotated[float, typer.Option("--lr", min=0, help="Learning rate of those optimizer steps.")] = 1e-3,
    as_json: Json = False,
) -> int:
    """Is the trainer's log-prob of every sampled token the engine's, bit for bit?

    Compares before and after optimizer steps with online weight updates.
    Exit code 0: holds. 1: does not hold. 3: could not be checked.
    """
    from vime_core.config.load import load_config
    from vime_core.verify.align_live import AlignOptions
    from vime_core.verify.checks import run_align

    config, plugins = load_config(files, overrides or [])
    return _print(run_align(config, plugins, AlignOptions(samples, updates, layers, longest), lr), as_json=as_json)


@app.command("batch")
def batch(
    files: Configs,
    overrides: Set = None,
    company: Annotated[int, typer.Option("--company", min=1, help="Other requests beside those compared.")] = 16,
    as_json: Json = False,
) -> int:
    """Is a response the same bits alone, in company, in another order, cached, chunked and as a prefill?

    Where it is not, the smallest company that breaks it is searched for.
    Exit code 0: holds. 1: does not hold. 3: could not be checked.
    """
    from vime_core.config.load import load_config
    from vime_core.verify.batch_live import BatchOptions
    from vime_core.verify.checks import run_batch

    config, plugins = load_config(files, overrides or [])
    return _print(run_batch(config, plugins, BatchOptions(company)), as_json=as_json)


@app.command("gradient")
def gradient(files: Configs, overrides: Set = None, as_json: Json = False) -> int:
    """Is the backward the same bits twice, its forward the scoring forward, and near fp64 autograd of a reference?

    Exit code 0: holds. 1: does not hold. 3: could not be checked.
    """
    from vime_core.config.load import load_config
    from vime_core.verify.checks import run_gradient

    config, plugins = load_config(files, overrides or [])
    return _print(run_gradient(config, plugins), as_json=as_json)


@app.command("all")
def every(
    files: Configs,
    overrides: Set = None,
    samples: Samples = 0,
    updates: Updates = 2,
    directory: Annotated[
        Path | None, typer.Option("--directory", help="Where the two records of repeat go; must not exist.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Every verdict that applies: repeat, resume (where checkpoints are written), gradient, batch, align, and the
    checks of plugins.

    Exit code 1 when one does not hold; else 3 when one could not be checked; else 0.
    """
    verdicts = list(_every(files, overrides or [], samples, updates, directory, quiet=as_json))
    code = worst_exit_code([verdict.exit_code for verdict in verdicts])
    if as_json:
        print_json({"exit_code": code, "verdicts": [verdict.as_json() for verdict in verdicts]})
    else:
        print(f"\n{table(verdicts)}\n\n" + "\n\n".join(verdict.sentence for verdict in verdicts))
    return code


def _every(
    files: Sequence[Path],
    overrides: Sequence[str],
    samples: int,
    updates: int,
    directory: Path | None,
    *,
    quiet: bool,
) -> Iterator[Verdict]:
    from vime_core.config.load import load_config
    from vime_core.verify.checks import run_every

    config, plugins = load_config(files, overrides)
    yield _repeat_verdict(files, overrides, directory, quiet=quiet)
    if config.run.checkpoint_every:
        yield _resume_verdict(files, overrides)
    yield from run_every(config, plugins, samples, updates, _starting)


def _starting(name: str) -> None:
    print(f"verify {name} ...", file=sys.stderr)


def _repeat_verdict(files: Sequence[Path], overrides: Sequence[str], directory: Path | None, *, quiet: bool) -> Verdict:
    from vime_core.verify.verdict import Verdict

    _starting("repeat")
    try:
        return _compare_records(*run_twice(files, overrides, directory, quiet=quiet))
    except BackendError as error:
        return Verdict("repeat", None, f"Repeat could not be checked: {error.message}.", first=error.code)


def _resume_verdict(files: Sequence[Path], overrides: Sequence[str]) -> Verdict:
    from vime_core.verify.verdict import Verdict

    _starting("resume")
    try:
        return resume.check_resume(files, overrides, resume.STEPS, resume.KILL_AFTER, None)[0]
    except BackendError as error:
        return Verdict("resume", None, f"Resume could not be checked: {error.message}.", first=error.code)


def worst_exit_code(codes: Sequence[int]) -> int:
    """1 when something does not hold, else 3 when something could not be checked or nothing was, else 0."""
    if 1 in codes:
        return 1
    return 0 if codes and set(codes) == {0} else 3


def table(verdicts: Sequence[Verdict]) -> str:
    """One line a verdict: outcome, what was compared, how much of it differs and where first."""
    words = {True: "holds", False: "does not hold", None: "not checked"}
    header = (
        "verdict",
        "outcome",
        "samples",
        "tokens",
        "tensors",
        "longest",
        "unequal",
        "nats",
        "ulps",
        "entropy",
        "changed",
        "first",
    )
    rows = [
        (
            verdict.name,
            words[verdict.holds],
            *(str(getattr(verdict.coverage, name)) for name in ("samples", "tokens", "tensors", "longest")),
            str(verdict.unequal),
            f"{verdict.largest_difference:.3g}",
            str(verdict.largest_ulps),
            _number(verdict.entropy, ".3f"),
            _number(verdict.changed, ".1%"),
            verdict.first or "-",
        )
        for verdict in verdicts
    ]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in (header, *rows))


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _print(verdict: Verdict, *, as_json: bool) -> int:
    if as_json:
        print_json(verdict.as_json())
    else:
        print(f"{verdict.sentence}\n\n{table([verdict])}")
    return verdict.exit_code


def _plugin_check(name: str) -> Any:
    """The command ``vime verify NAME``."""

    def check(files: Configs, overrides: Set = None, as_json: Json = False) -> int:
        from vime_core.config.load import load_config
        from vime_core.verify.checks import run_check

        config, plugins = load_config(files, overrides or [])
        return _print(run_check(config, plugins, name), as_json=as_json)

    single = typer.Typer()
    single.command(name, help="A check that a plugin registered.")(check)
    return typer.main.get_command(single)


def _compare_records(first: Path, second: Path) -> Verdict:
    from vime_core.record.reader import RunRecord
    from vime_core.verify.repeat import verify_repeat

    return verify_repeat(RunRecord.open(first), RunRecord.open(second))


def run_twice(files: Sequence[Path], overrides: Sequence[str], directory: Path | None, *, quiet: bool) -> list[Path]:
    """Run a configuration twice in fresh processes and return the two record directories."""
    from vime_core.config.load import load_config

    config, _ = load_config(files, overrides)
    parent = new_directory(config.run.output, directory, "repeat")
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
