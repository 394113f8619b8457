"""Providers by name."""

from __future__ import annotations

from importlib import import_module
from typing import Final, cast

from vime_core.errors import PolicyError
from vime_core.numerics.operations import Operations

PROVIDERS: Final = {
    "reference": "vime_core.numerics.reference",
    "cpu": "vime_core.numerics.cpu.provider",
    "cuda": "vime_core.numerics.cuda.provider",
}


def load_provider(name: str) -> Operations:
    """The operations of provider ``name``, built where it has to be built.

    Raises:
        PolicyError: no provider of that name, or it cannot run on this machine; the message names another.
    """
    if name not in PROVIDERS:
        raise PolicyError(
            f"numerics provider {name!r} does not exist",
            remedy=f"Choose one of: {', '.join(sorted(PROVIDERS))}.",
            code="VIME-ENV-040",
        )
    return cast("Operations", import_module(PROVIDERS[name]).load())
