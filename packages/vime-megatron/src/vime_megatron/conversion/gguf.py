"""GGUF to a HF model directory: dequantised once, rounded to bf16, and read back to prove what was written."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vime_core.errors import ConfigError
from vime_megatron.model_directory import read_model_directory
from vime_megatron.requirement import require_transformers


def convert_gguf(gguf: Path, output: Path) -> Path:
    """Write the model and tokenizer of a GGUF file as a HF model directory in bf16.

    Args:
        gguf: the file; its architecture must be one that transformers reads.
        output: the directory to make; it must not exist.

    Raises:
        PluginError: transformers is absent.
        ConfigError: ``output`` exists, ``gguf`` is missing or unreadable, or what was written differs when read back.
    """
    if output.exists():
        raise ConfigError(
            f"output {str(output)!r} exists",
            remedy="Name a directory that does not exist yet.",
            code="VIME-CONFIG-047",
        )
    if not gguf.is_file():
        raise ConfigError(f"GGUF file {str(gguf)!r} does not exist", remedy="Correct the path.", code="VIME-CONFIG-046")
    require_transformers("reading GGUF files", "gguf")
    print(f"Converting {gguf.name} to a HF directory, once", file=sys.stderr, flush=True)
    with _quiet_transformers():
        model, tokenizer = _load(gguf)
        model.save_pretrained(output)
        tokenizer.save_pretrained(output)
    _verify(model.state_dict(), output, tied=bool(model.config.tie_word_embeddings))
    return output


@contextmanager
def _quiet_transformers() -> Generator[None]:
    """Without its progress bars, and without advice about a quantised model that is not kept."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _load(gguf: Path) -> tuple[Any, Any]:
    """The dequantised model and its tokenizer, no longer marked as quantised."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where: dict[str, Any] = {"pretrained_model_name_or_path": str(gguf.parent.resolve()), "gguf_file": gguf.name}
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(dtype=torch.bfloat16, **where)
        tokenizer: Any = AutoTokenizer.from_pretrained(**where)
    except ImportError as error:
        raise ConfigError(
            f"reading GGUF files needs more packages: {error}",
            remedy="Run: pip install 'vime-megatron[gguf]'",
            code="VIME-CONFIG-048",
        ) from error
    except Exception as error:
        raise ConfigError(
            f"{str(gguf)!r} cannot be read as GGUF: {error}",
            remedy="Use a GGUF file of an architecture that transformers supports, or copy the file again.",
            code="VIME-CONFIG-049",
        ) from error
    # transformers keeps the file's quantisation as the model's own and would refuse to save plain weights.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    return model, tokenizer


def _verify(wanted: Mapping[str, Tensor], output: Path, *, tied: bool) -> None:
    written = read_model_directory(output).load()
    absent = set(wanted) - set(written) - ({"lm_head.weight"} if tied else set[str]())
    unequal = [name for name, tensor in written.items() if name not in wanted or not _same_bits(tensor, wanted[name])]
    if absent or unequal:
        raise ConfigError(
            f"{str(output)!r} was written, but reads back differently: {sorted(absent) + unequal}",
            remedy="Check the disk, remove the directory and convert again.",
            code="VIME-CONFIG-050",
        )


def _same_bits(first: Tensor, second: Tensor) -> bool:
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    return torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))
