"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Configs = Annotated[list[Path], typer.Argument(help="TOML files, overlaid left to right.", show_default=False)]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="Override a key: --set trainer.lr=1e-6. Repeatable.", metavar="SECTION.KEY=VALUE"),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
