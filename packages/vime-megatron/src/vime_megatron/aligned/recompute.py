"""Activation recomputation: the backward runs the forward of each decoder layer, or of its core attention, again."""


# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

from torch.utils.checkpoint import checkpoint

from vime_core.errors import ConfigError
from vime_megatron.model import PolicyModel

Granularity = Literal["none", "full", "selective"]


@contextmanager
def recomputing(model: PolicyModel, granularity: Granularity = "full") -> Generator[None]:
    """Keep only the inputs of layers (``full``) or of core attention (``selective``) for the backward.

    The block holds forward and backward. The recomputed forward is the same code on the same inputs, so with
    deterministic kernels no bit of a gradient changes.
    """
    modules = recomputed_modules(model, granularity)
    try:
        for module in modules:
            module.forward = partial(checkpoint, module.forward, use_reentrant=False, preserve_rng_state=False)
        yield
    finally:
        for module in modules:
            vars(module).pop("forward", None)


def recomputed_modules(model: PolicyModel, granularity: Granularity) -> list[Any]:
    """The modules whose forward runs again.

    Raises:
        ConfigError: selective recomputation of a structure that has no core attention of its own.
    """
    layers: list[Any] = [] if granularity == "none" else list(model.decoder.layers)
    if granularity != "selective":
        return layers
    found = [getattr(getattr(layer, "self_attention", None), "core_attention", None) for layer in layers]
    if None in found:
        raise ConfigError(
            "trainer.megatron.recompute = 'selective' needs layers with a core attention, and this structure has none",
            remedy="Set trainer.megatron.recompute = 'full'.",
            code="VIME-CONFIG-066",
        )
    return found
