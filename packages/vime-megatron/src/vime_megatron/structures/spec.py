"""Whose modules a model is built from: ``trainer.megatron.spec``."""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Final

from vime_core.errors import ConfigError
from vime_megatron.structures.types import Blueprint

ENGINE: Final = "transformer_engine"


def of_spec(blueprint: Blueprint, spec: str) -> Blueprint:
    """The blueprint with Transformer Engine's modules where they are asked for.

    Raises:
        ConfigError: they are, and Transformer Engine, a CUDA device or the structure's part is absent.
    """
    if spec != "te":
        return blueprint
    import torch

    if find_spec(ENGINE) is None:
        raise _no_engine(
            f"needs {ENGINE}, which is not installed", "Install it (pip install transformer-engine[pytorch])"
        )
    if not torch.cuda.is_available():
        raise _no_engine("needs a CUDA device, and there is none", "Run on a machine with one")
    if blueprint.te_block_spec is None:
        raise _no_engine("has no modules for this model's structure", "Take another model")
    return replace(blueprint, block_spec=blueprint.te_block_spec)


def _no_engine(what: str, remedy: str) -> ConfigError:
    return ConfigError(
        f"trainer.megatron.spec = 'te' {what}",
        remedy=f"{remedy}, or set trainer.megatron.spec = 'local'.",
        code="VIME-CONFIG-067",
    )
