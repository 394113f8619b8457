"""``vime convert``: checkpoints from one form to another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vime_cli.arguments import Json
from vime_cli.output import print_json

app = typer.Typer(help="Convert checkpoints.", no_args_is_help=True)


@app.callback()
def _group() -> None:  # pyright: ignore[reportUnusedFunction]
    """Keep the conversions subcommands while there is only one."""


@app.command("gguf-to-hf")
def gguf_to_hf(
    gguf: Annotated[Path, typer.Argument(help="The .gguf file.", show_default=False)],
    output: Annotated[Path, typer.Argument(help="The HF directory to write; must not exist.", show_default=False)],
    as_json: Json = False,
) -> int:
    """Dequantise a GGUF model into a HF directory and check what was written."""
    from vime_core.plugins.types import load_attribute

    converted = load_attribute("vime_megatron.conversion.gguf:convert_gguf", "gguf-to-hf")(gguf, output)
    if as_json:
        print_json({"directory": str(output), "summary": str(converted)})
    else:
        print(converted)
    return 0
