"""``vime plugins``: what is installed and what it registers."""

from __future__ import annotations

import tempfile
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import typer

from vime_cli.arguments import Json
from vime_cli.output import print_json


class Dtype(StrEnum):
    """Training dtypes that a contract is tried in."""

    BF16 = "bf16"
    FP32 = "fp32"


_OUTCOMES: Final = {True: "holds", False: "DOES NOT", None: "not checked"}

app = typer.Typer(help="Installed plugins and what they register.", no_args_is_help=True)


@app.command("list")
def list_plugins(as_json: Json = False) -> int:
    """List plugins with their registrations; broken ones and conflicts are named.

    Exit code 0: all loaded. 1: one is broken, or two are in conflict.
    """
    from vime_core.plugins.manager import PluginManager

    manager = PluginManager.discover()
    if as_json:
        print_json(_document(manager))
    else:
        print(_text(manager))
    return 1 if manager.broken() or manager.conflicts() else 0


@app.command("check")
def check(
    distribution: Annotated[str, typer.Argument(help="Name of an installed distribution with plugins.")],
    dtype: Annotated[Dtype | None, typer.Option("--dtype", help="Try this one only; without it, both.")] = None,
    as_json: Json = False,
) -> int:
    """Load everything that a distribution registers, and hold its contracts on a real trainer and engine.

    On each model that it registers for a contract: gradient, batch and align with every tap, in bf16 and fp32.
    Exit code 0: all of it holds. 1: something does not. 3: something could not be checked.
    """
    from vime_core.testing.kit import CASES, Checked, check_distribution

    found: list[Checked] = []
    with tempfile.TemporaryDirectory(prefix="vime-kit-") as scratch:
        for one in check_distribution(distribution, Path(scratch), [dtype.value] if dtype else list(CASES)):
            found.append(one)
            if not as_json:
                print(f"{_OUTCOMES[one.holds]:<12} {one.what}: {one.sentence}", flush=True)
    if as_json:
        print_json([{"what": one.what, "holds": one.holds, "sentence": one.sentence} for one in found])
    outcomes = {one.holds for one in found}
    return 1 if False in outcomes else 3 if None in outcomes else 0


@app.command("new")
def new(
    name: Annotated[str, typer.Argument(help="Of the distribution, such as vime-mine; a directory of that name.")],
    as_json: Json = False,
) -> int:
    """Write a distribution with a structure, its contract and both sides, which `vime plugins check` finds whole."""
    from vime_cli.skeleton import write_skeleton

    place = write_skeleton(name, Path.cwd())
    if as_json:
        print_json({"directory": str(place)})
    else:
        print(f"Wrote {place}. Next: pip install -e {place.name} && vime plugins check {name}")
    return 0


def _document(manager: object) -> dict[str, object]:
    from vime_core.plugins.manager import PluginManager

    assert isinstance(manager, PluginManager)
    return {
        "plugins": [
            {"name": i.name, "distribution": i.distribution, "version": i.version, "error": i.error}
            for i in manager.plugins()
        ],
        "registrations": [
            {
                "kind": e.registration.kind,
                "name": e.registration.name,
                "summary": e.registration.summary,
                "plugin": e.plugin.name,
            }
            for e in manager.entries()
        ],
        "conflicts": [error.message for error in manager.conflicts()],
    }


def _text(manager: object) -> str:
    from vime_core.plugins.manager import PluginManager

    assert isinstance(manager, PluginManager)
    lines: list[str] = []
    for info in manager.plugins():
        lines.append(f"{info.name}  ({info.distribution} {info.version})".rstrip())
        if info.error:
            lines.append(f"  broken: {info.error}")
        lines += [
            f"  {e.registration.kind:<13} {e.registration.name:<18} {e.registration.summary}"
            for e in manager.entries()
            if e.plugin.name == info.name
        ]
    lines += [f"conflict: {error.message}" for error in manager.conflicts()]
    return "\n".join(lines)
