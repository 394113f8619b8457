"""The ``vime`` application: commands, exit codes, and errors without a traceback.

Exit codes: 0 holds, 1 does not hold, 2 usage or configuration error, 3 could not be checked, 128 + N ended by signal N
(141: nobody reads the output any more).
"""

from __future__ import annotations

import sys
from contextlib import nullcontext

import typer

from vime_cli.commands import convert, diff, doctor, plugins, report, run, verify
from vime_cli.foreign import raised_by_typer, unexpected, usage_error
from vime_cli.output import document_only, print_error, print_interruption, print_json
from vime_cli.signals import taking_signals
from vime_cli.streams import StreamLost, checked_streams
from vime_cli.thirdparty import add_plugin_commands
from vime_core import __version__
from vime_core.errors import BackendError, ConfigError, Interrupted, VimeError

app = typer.Typer(
    name="vime",
    help="RL post-training whose numbers can be checked bit by bit.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("run", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(run.run)
app.add_typer(verify.app, name="verify")
app.command("diff")(diff.diff)
app.command("report")(report.report)
app.command("doctor")(doctor.doctor)
app.add_typer(convert.app, name="convert")
app.add_typer(plugins.app, name="plugins")


def _version(show: bool) -> None:
    if show:
        if "--json" in sys.argv:
            print_json({"vime": __version__})
        else:
            typer.echo(f"vime {__version__}")
        raise typer.Exit


@app.callback()
def _global(  # pyright: ignore[reportUnusedFunction]
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
    as_json: bool = typer.Option(False, "--json", help="With --version: print one JSON document."),
) -> None:
    del version
    if as_json:
        raise ConfigError("--json stands before the command", remedy="Put it behind.", code="VIME-CLI-001")


def main() -> int:
    """Run the command line and return its exit code."""
    as_json = "--json" in sys.argv
    try:
        with checked_streams():
            return _answer(as_json=as_json)
    except StreamLost as lost:
        if not lost.closed:
            print_error(lost.as_error(), as_json=False)
        return lost.exit_code


def _answer(*, as_json: bool) -> int:
    try:
        with taking_signals(), document_only() if as_json else nullcontext():
            add_plugin_commands(app, sys.argv[1:])
            result = app(standalone_mode=False)
    except VimeError as error:
        print_error(error, as_json=as_json)
        return error.exit_code
    except StreamLost:
        raise
    except Interrupted as error:
        print_interruption(error, as_json=as_json)
        return error.exit_code
    except typer.Abort:
        return 130
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # asyncio's and generators' own too, for which Python would end with 1, as if a verdict did not hold.
        return _other(error, as_json=as_json)
    return result if isinstance(result, int) else 0


def _other(error: BaseException, *, as_json: bool) -> int:
    """A wrong command line, else what should not have come so far: exit code 1 is kept for what does not hold."""
    if isinstance(error, SystemExit) and raised_by_typer(error):
        return error.code if isinstance(error.code, int) else 0
    show = getattr(error, "show", None)
    if show is None:
        print_error(unexpected(error), as_json=as_json)
        return BackendError.exit_code
    if as_json:
        print_error(usage_error(error), as_json=True)
    else:
        show()
    return 2
