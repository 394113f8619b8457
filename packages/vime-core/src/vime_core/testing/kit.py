"""The contract kit: is a distribution's plugin whole, and do its contracts hold on a real trainer and engine?"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vime_core.errors import PluginError, VimeError
from vime_core.plugins.manager import Entry, PluginInfo, PluginManager
from vime_core.plugins.types import AlignedSide, ContractEntry, ContractModel
from vime_core.testing.runs import load_run, write_run

CASES: Final = {"bf16": (0, 0.7), "fp32": (1, 1.0)}
"""By training dtype: seed of the model and temperature that a contract is tried with."""


@dataclass(frozen=True)
class Checked:
    """One thing that was checked: ``holds`` is None where it could not be."""

    what: str
    holds: bool | None
    sentence: str


def check_distribution(name: str, scratch: Path, dtypes: Sequence[str] = tuple(CASES)) -> Iterator[Checked]:
    """Load what a distribution registers, then run the verdicts on the models of its contracts.

    Args:
        name: of an installed distribution.
        scratch: an empty directory for models.
        dtypes: of `CASES`.

    Raises:
        PluginError: it is not installed, or has no plugin.
    """
    manager = PluginManager.discover()
    infos = [info for info in manager.plugins() if _same(info.distribution, name)]
    if not infos:
        known = ", ".join(sorted({info.distribution for info in manager.plugins() if info.distribution}))
        raise PluginError(
            f"no installed distribution {name!r} has a plugin of vime. Installed with plugins: {known}",
            remedy="Install it, and name its plugin module in the entry-point group 'vime'.",
            code="VIME-PLUGIN-040",
        )
    yield from (_loaded_plugin(info) for info in infos)
    yield from (Checked("conflicts", False, error.message) for error in manager.conflicts())
    entries = [entry for entry in manager.entries() if entry.plugin in infos]
    loaded = [_loaded(entry) for entry in entries]
    yield from loaded
    if not entries:
        yield Checked("registrations", None, "it registers nothing that could be checked")
    if all(one.holds for one in loaded):
        contracts = [entry.registration for entry in entries if isinstance(entry.registration, ContractEntry)]
        for contract in contracts:
            yield from check_contract(contract.name, manager, scratch, dtypes)


def check_contract(
    contract: str, manager: PluginManager, scratch: Path, dtypes: Sequence[str] = tuple(CASES)
) -> Iterator[Checked]:
    """The verdicts gradient, batch and align (with taps) on every model that is registered for a contract."""
    sides = [side.backend for side in manager.of_kind(AlignedSide) if side.contract == contract]
    models = [model for model in manager.of_kind(ContractModel) if model.contract == contract]
    if len(set(sides)) < 2:
        yield Checked(contract, False, f"a trainer's and an engine's side are needed; registered: {sides or 'none'}")
    elif not models:
        yield Checked(contract, None, "nothing registers a model to try it on (hook vime_contract_models)")
    else:
        for model in models:
            yield from _verdicts(model, scratch, dtypes)


def _verdicts(model: ContractModel, scratch: Path, dtypes: Sequence[str]) -> Iterator[Checked]:
    from vime_core.verify.checks import run_every

    for dtype in dtypes:
        seed, temperature = CASES[dtype]
        place = scratch / f"{model.name}-{dtype}"
        what = f"{model.contract} {model.name} {dtype}"
        try:
            model.load()(place, dtype, seed)
            file = write_run(place, dtype, model.contract, sampling={"temperature": temperature})
            config, plugins = load_run(file)
            for verdict in run_every(config, plugins, samples=0, updates=2, starting=lambda _: None):
                yield Checked(f"{what} {verdict.name}", verdict.holds, verdict.sentence)
        except VimeError as error:
            yield Checked(what, False, f"{error.code}: {error.message}")


def _loaded_plugin(info: PluginInfo) -> Checked:
    return Checked(f"plugin {info.name}", not info.error, info.error or f"{info.distribution} {info.version}")


def _loaded(entry: Entry) -> Checked:
    registration = entry.registration
    what = f"{registration.kind} {registration.name}"
    try:
        registration.load()
        registration.options_class()
    except Exception as error:  # the code of a plugin raises what it likes
        return Checked(what, False, f"{registration.target}: {type(error).__name__}: {error}")
    return Checked(what, True, registration.target)


def _same(first: str, second: str) -> bool:
    """Names of distributions, as PEP 503 compares them."""
    return re.sub(r"[-_.]+", "-", first).lower() == re.sub(r"[-_.]+", "-", second).lower()
