"""The ``vime`` application: commands, exit codes, and errors without a traceback.

Exit codes: 0 holds, 1 does not hold, 2 usage or configuration error, 3 could not be checked.
"""

from __future__ import annotations

import sys

import typer

from vime_cli.commands import convert, diff, doctor, plugins, run, verify
from vime_cli.output import print_error, print_interruption
from vime_cli.signals import taking_signals
from vime_cli.thirdparty import add_plugin_commands
from vime_core import __version__
from vime_core.errors import Interrupted, VimeError

app = typer.Typer(
    name="vime",
    help="RL post-training whose numbers can be checked bit by bit.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("run")(run.run)
app.add_typer(verify.app, name="verify")
app.command("diff")(diff.diff)
app.command("doctor")(doctor.doctor)
app.add_typer(convert.app, name="convert")
app.add_typer(plugins.app, name="plugins")


def _version(show: bool) -> None:
    if show:
        typer.echo(f"vime {__version__}")
        raise typer.Exit


@app.callback()
def _global(  # pyright: ignore[reportUnusedFunction]
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    del version


def main() -> int:
    """Run the command line and return its exit code."""
    try:
        with taking_signals():
            add_plugin_commands(app, sys.argv[1:])
            result = app(standalone_mode=False)
    except VimeError as error:
        print_error(error, as_json="--json" in sys.argv)
        return error.exit_code
    except Interrupted as error:
        print_interruption(error, as_json="--json" in sys.argv)
        return error.exit_code
    except typer.Abort:
        return 130
    except SystemExit as error:
        # Commands return their exit code, so this came from foreign code: it must not pass for an outcome.
        print(f"error: a plugin or hook ended the process with SystemExit({error.code!r})", file=sys.stderr)
        return 3
    except Exception as error:
        return _usage_error(error)
    return result if isinstance(result, int) else 0


def _usage_error(error: Exception) -> int:
    show = getattr(error, "show", None)
    if show is None:
        raise error
    show()
    return 2
