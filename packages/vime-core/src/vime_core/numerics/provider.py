"""Providers by name."""

from __future__ import annotations

from importlib import import_module
from typing import Final, cast

from vime_core.errors import PolicyError
from vime_core.numerics.offers import NO_OFFERS, Offers
from vime_core.numerics.operations import Operations

PROVIDERS: Final = {
    "reference": "vime_core.numerics.reference",
    "cpu": "vime_core.numerics.cpu.provider",
    "cuda": "vime_core.numerics.cuda.provider",
}


def require_provider(name: str) -> None:
    """What can be said of ``alignment.provider`` before anything is built.

    Raises:
        PolicyError: no provider of that name, or this machine has no device for it.
    """
    if name not in PROVIDERS:
        raise PolicyError(
            f"alignment.provider = {name!r}: there is no numerics provider of that name",
            remedy=f"Choose one of: {', '.join(sorted(PROVIDERS))}.",
            code="VIME-ENV-040",
        )
    if name == "cuda":
        from vime_core.numerics.cuda.provider import require_device

        require_device()


def load_provider(name: str, offers: Offers = NO_OFFERS) -> Operations:
    """The operations of provider ``name``, built where it has to be built.

    Args:
        name: ``alignment.provider``.
        offers: kernels that other packages offer; only ``cuda`` takes any.

    Raises:
        PolicyError: no provider of that name, or it cannot run on this machine; the message names another.
    """
    require_provider(name)
    load = import_module(PROVIDERS[name]).load
    return cast("Operations", load(offers) if name == "cuda" else load())
