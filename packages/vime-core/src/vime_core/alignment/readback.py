"""What the processes of both sides really installed must be one contract, one provider, one digest of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, cast

from vime_core.alignment.choice import Alignment
from vime_core.errors import ContractViolation
from vime_core.types import ProcessReport

CONTRACT_SETTINGS: Final = ("contract", "contract_digest", "provider", "provider_digest")
"""Settings that every computing process of an aligned run reports, read back from what it installed."""

KERNELS: Final = "kernels"
"""Setting of the same processes: what serves each call where the provider was offered kernels (`Kernels.choices`)."""


def require_same_contract(alignment: Alignment | None, reports: Iterable[ProcessReport]) -> None:
    """Compare what trainer and engine processes report with the contract and with each other.

    Every process of the trainer computes; of the engine's, those that report a contract at all.

    Raises:
        ContractViolation: a side reports nothing, another contract, another digest or other kernels; or nothing was
            compared.
    """
    if alignment is None:
        return
    holders = [r for r in reports if r.role == "trainer" or (r.role != "driver" and "contract" in r.settings)]
    for role in ("trainer", "rollout"):
        if not any(report.role == role for report in holders):
            raise _violation(f"no process of the {role} reports a contract", alignment)
    wanted = {"contract": alignment.contract.id, "contract_digest": alignment.contract.digest}
    wanted["provider"] = alignment.provider
    wanted["provider_digest"] = str(holders[0].settings.get("provider_digest", ""))
    for report in holders:
        for name, value in wanted.items():
            if not value or report.settings.get(name) != value:
                found = report.settings.get(name)
                raise _violation(f"{report.role} {report.rank} has {name} = {found!r}, expected {value!r}", alignment)
    _require_same_kernels(alignment, holders)


def _require_same_kernels(alignment: Alignment, holders: list[ProcessReport]) -> None:
    """What serves a call that two processes have seen must be the same in both."""
    chosen: dict[str, tuple[str, ProcessReport]] = {}
    for report in holders:
        kernels = cast("Mapping[str, str]", report.settings.get(KERNELS, {}))
        for call, found in kernels.items():
            first, whose = chosen.setdefault(call, (found, report))
            if found != first:
                other = f"{whose.role} {whose.rank}"
                raise _violation(
                    f"{report.role} {report.rank} computes {call} by {found!r}, {other} by {first!r}", alignment
                )


def _violation(what: str, alignment: Alignment) -> ContractViolation:
    return ContractViolation(
        f"contract {alignment.contract.id} does not hold: {what}",
        remedy="Both sides must run the same build of vime and of the provider; see `vime doctor` on each machine.",
        code="VIME-ALIGN-004",
    )
