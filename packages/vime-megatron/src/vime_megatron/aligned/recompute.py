"""Activation recomputation, one decoder layer at a time: the backward runs each layer's forward again."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch.utils.checkpoint import checkpoint

from vime_megatron.model import PolicyModel


@contextmanager
def recomputing(model: PolicyModel) -> Generator[None]:
    """Keep only each layer's input for the backward, within a block that holds forward and backward."""
    layers: list[Any] = list(model.decoder.layers)
    try:
        for layer in layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)
