"""``vime convert``: checkpoints from one form to another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vime_cli.arguments import Json
from vime_cli.flags import pairs
from vime_cli.output import print_json

app = typer.Typer(help="Convert checkpoints.", no_args_is_help=True)


@app.command("gguf-to-hf")
def gguf_to_hf(
    gguf: Annotated[Path, typer.Argument(help="The .gguf file.", show_default=False)],
    output: Annotated[Path, typer.Argument(help="The HF directory to write; must not exist.", show_default=False)],
    as_json: Json = False,
) -> int:
    """Dequantise a GGUF model into a HF directory and check what was written."""
    from vime_core.plugins.types import load_attribute

    convert = load_attribute("vime_megatron.conversion.gguf:convert_gguf", "gguf-to-hf")
    return _say(output, convert(gguf, output), as_json)


TORCH_DIST = "vime_megatron.conversion.torch_dist"


@app.command("hf-to-torch-dist", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def hf_to_torch_dist(
    context: typer.Context,
    source: Annotated[Path, typer.Option("--hf-checkpoint", help="The HF directory.", show_default=False)],
    output: Annotated[Path, typer.Option("--save", help="The directory to write; must not exist.", show_default=False)],
    as_json: Json = False,
) -> int:
    """Write a HF model as a Megatron torch_dist checkpoint and check what was written, tensor by tensor.

    Megatron's model flags (--num-layers 24 ...) may follow: one that contradicts the checkpoint, or is not known, is
    refused. Under torchrun the ranks write a part each, by --tensor-model-parallel-size and
    --pipeline-model-parallel-size.
    """
    from vime_core.plugins.types import load_attribute

    flags = dict(pairs(context.args, "vime convert hf-to-torch-dist"))
    convert = load_attribute(f"{TORCH_DIST}:to_torch_dist", "hf-to-torch-dist")
    converted = convert(source, output, flags)
    return 0 if converted is None else _say(output, converted, as_json)  # the first of several ranks speaks for all


@app.command("torch-dist-to-hf")
def torch_dist_to_hf(
    source: Annotated[Path, typer.Argument(help="What hf-to-torch-dist wrote.", show_default=False)],
    output: Annotated[Path, typer.Argument(help="The HF directory to write; must not exist.", show_default=False)],
    as_json: Json = False,
) -> int:
    """Write a torch_dist checkpoint as a HF model and check what was written, tensor by tensor."""
    from vime_core.plugins.types import load_attribute

    convert = load_attribute(f"{TORCH_DIST}:to_hf_directory", "torch-dist-to-hf")
    return _say(output, convert(source, output), as_json)


def _say(output: Path, summary: object, as_json: bool) -> int:
    if as_json:
        print_json({"directory": str(output), "summary": str(summary)})
    else:
        print(summary)
    return 0
