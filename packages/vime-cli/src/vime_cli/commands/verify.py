"""``vime verify``: separate, bitwise verdicts."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from typer.core import TyperGroup

from vime_cli.arguments import Configs, Json, Set
from vime_cli.commands import resume
from vime_cli.commands.twice import run_twice
from vime_cli.output import error_table, print_error, print_json
from vime_core.errors import BackendError, ConfigError, ContractViolation, VimeError

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
    Exit code 0: holds. 1: does not hold, or a run found a mismatch within itself. 2: a run refused its input. 3: could
    not be checked.
    """
    records = _records(inputs)
    if overrides and records:
        raise ConfigError(
            "--set is given with two run records", remedy="Leave it out, or name a TOML file.", code="VIME-CONFIG-008"
        )
    try:
        records = records or run_twice(inputs, overrides or [], directory, quiet=as_json)
        verdict = _compare_records(*records)
    except ContractViolation as error:
        verdict = _broke_off(error)
    if as_json:
        print_json({**verdict.as_json(), "records": [str(record) for record in records]})
    else:
        print(f"\n{verdict.sentence}" + (f"\nRecords: {' and '.join(map(str, records))}" if records else ""))
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
        int,
        typer.Option("--longest", min=0, help="Tokens of the longest sequence; 0: as many as rollout.context_length."),
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
    verdicts: list[Verdict] = []
    try:
        for verdict in _every(files, overrides or [], samples, updates, directory, quiet=as_json):
            verdicts.append(verdict)
            if not as_json:
                print(f"{verdict.sentence}\n", flush=True)
    except VimeError as error:
        if not verdicts:
            raise
        return _print_every(verdicts, error, as_json=as_json)
    return _print_every(verdicts, None, as_json=as_json)


def _print_every(verdicts: Sequence[Verdict], error: VimeError | None, *, as_json: bool) -> int:
    """What is known at the end, or when an error ended the rest; the exit code."""
    code = worst_exit_code([verdict.exit_code for verdict in verdicts], error.exit_code if error else 0)
    if as_json:
        document: dict[str, Any] = {"exit_code": code, "verdicts": [verdict.as_json() for verdict in verdicts]}
        print_json(document | ({"error": error_table(error)} if error else {}))
        return code
    print(f"{table(verdicts)}\n\n{LEGEND}")
    if error:
        print(f"\nThe rest was not checked, because of an error after these {len(verdicts)}.", flush=True)
        print_error(error, as_json=False)
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
    except ContractViolation as error:
        return _broke_off(error)
    except BackendError as error:
        return Verdict("repeat", None, f"Repeat could not be checked: {error.message}.", first=error.code)


def _broke_off(error: ContractViolation) -> Verdict:
    from vime_core.verify.verdict import Verdict

    sentence = f"Repeat does not hold: {error.message} ({error.code})."
    return Verdict("repeat", False, sentence, unequal=1, first=error.code)


def _resume_verdict(files: Sequence[Path], overrides: Sequence[str]) -> Verdict:
    from vime_core.verify.verdict import Verdict

    _starting("resume")
    try:
        return resume.check_resume(files, overrides, resume.STEPS, resume.KILL_AFTER, None)[0]
    except BackendError as error:
        return Verdict("resume", None, f"Resume could not be checked: {error.message}.", first=error.code)


LEGEND: Final = """\
samples, tokens, tensors: how many were compared; log-probs: the same, of each comparison that a token takes part in
(align compares it with the trainer's scoring and training forward); longest: tokens of the longest sequence; unequal:
how many differ, of the log-probs, the tensors or what the sentence says; nats, ulps: the largest difference; entropy:
nats a token of what was compared; changed: share of the weights that training changed (tensors in repeat and resume,
bf16 elements in align); first: the first place that differs."""


COMPARED: Final = ("samples", "tokens", "log_probs", "tensors", "longest")


def worst_exit_code(codes: Sequence[int], error: int = 0) -> int:
    """1 when something does not hold, else the error's, else 3 when something or all was not checked, else 0."""
    if 1 in codes:
        return 1
    return error or (0 if codes and set(codes) == {0} else 3)


def table(verdicts: Sequence[Verdict]) -> str:
    """One line a verdict: outcome, what was compared, how much of it differs and where first."""
    words = {True: "holds", False: "does not hold", None: "not checked"}
    header = (
        "verdict",
        "outcome",
        *(name.replace("_", "-") for name in COMPARED),
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
            *(str(getattr(verdict.coverage, name)) for name in COMPARED),
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
        print(f"{verdict.sentence}\n\n{table([verdict])}\n\n{LEGEND}")
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


def _records(inputs: Sequence[Path]) -> list[Path]:
    """The two records that are to be compared, or none when all inputs are files of a configuration.

    Raises:
        ConfigError: there is one record, or more than two, or a record beside a file.
    """
    records = [path for path in inputs if path.is_dir()]
    if not records or (len(records) == len(inputs) == 2):
        return records
    given = f"{len(records)} record{'s' if len(records) > 1 else ''}"
    others = f" and {len(inputs) - len(records)} files" if len(records) < len(inputs) else ""
    raise ConfigError(
        f"verify repeat was given {given}{others}: {', '.join(map(str, inputs))}",
        remedy="Name two records to compare them, or only TOML files to run them twice.",
        code="VIME-CONFIG-021",
    )
