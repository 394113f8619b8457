"""Which kernels of other packages a run may take for its provider's operations: ``alignment.linear``, ``attention``."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from vime_core.config.schema import AlignmentSection
from vime_core.errors import PolicyError
from vime_core.plugins.manager import PluginManager
from vime_core.plugins.types import KernelEntry, load_attribute

if TYPE_CHECKING:
    from vime_core.numerics.offers import Offers

OPERATIONS: Final = ("linear", "attention")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Offered:
    """A package's kernels for one operation, as plain data that travels to every computing process.

    Args:
        operation: ``linear`` or ``attention``.
        name: as the configuration names it.
        target: what makes the offer, ``"module:attribute"``.
        required: the configuration names it, so nothing else will do.
    """

    operation: str
    name: str
    target: str
    required: bool


def choose_offered(section: AlignmentSection, plugins: PluginManager) -> tuple[Offered, ...]:
    """What the configuration lets stand in for the provider's own kernels.

    Raises:
        PolicyError: it names kernels that nothing offers for this provider.
    """
    return tuple(offer for operation in OPERATIONS for offer in _of(operation, section, plugins))


def _of(operation: str, section: AlignmentSection, plugins: PluginManager) -> list[Offered]:
    wanted = getattr(section, operation)
    entries = [e for e in plugins.of_kind(KernelEntry) if (e.provider, e.operation) == (section.provider, operation)]
    named = {e.name: Offered(operation, e.name, e.target, required=wanted == e.name) for e in entries}
    if wanted == "own":
        return []
    if wanted == "auto":
        return list(named.values())
    if wanted in named:
        return [named[wanted]]
    raise _refusal(
        f"alignment.{operation} = {wanted!r}: nothing offers a {operation} of that name to provider"
        f" {section.provider!r}; known: {', '.join(['auto', 'own', *named])}",
        operation,
    )


def open_offers(offered: Sequence[Offered]) -> Offers:
    """Ask for every offer in this process; of several for one operation the first that can run here is taken.

    Raises:
        PluginError: a target cannot be imported.
        PolicyError: one that the configuration names cannot run here.
    """
    from vime_core.numerics.offers import Offers

    taken: dict[str, Any] = {}
    absent: list[tuple[str, str]] = []
    for each in offered:
        found = load_attribute(each.target, each.name)()
        if not isinstance(found, str):
            taken.setdefault(each.operation, found)
        elif each.required:
            raise _refusal(f"alignment.{each.operation} = {each.name!r} cannot run here: {found}", each.operation)
        else:
            absent.append((each.name, found))
            log.info("%s: %s is not used: %s", each.operation, each.name, found)
    required = frozenset(each.operation for each in offered if each.required)
    return Offers(taken.get("linear"), taken.get("attention"), required, tuple(absent))


def _refusal(what: str, operation: str) -> PolicyError:
    return PolicyError(
        what,
        remedy=f'Set alignment.{operation} = "auto" or "own", or install the package that offers it.',
        code="VIME-ALIGN-012",
    )
