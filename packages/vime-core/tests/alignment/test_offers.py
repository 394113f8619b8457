"""Which offered kernels a configuration takes, and that both sides must have chosen the same."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vime_core.alignment import Alignment, Offered, require_same_contract
from vime_core.alignment.offers import choose_offered, open_offers
from vime_core.config.schema import AlignmentSection
from vime_core.errors import ContractViolation, PolicyError
from vime_core.numerics.contract import DENSE_V1
from vime_core.plugins import KernelEntry, hookimpl
from vime_core.plugins.manager import PluginInfo, PluginManager
from vime_core.types import ProcessReport, Role

HERE = __name__
SWIFT = SimpleNamespace(name="swift")


def swift() -> object:
    return SWIFT


def tardy() -> object:
    return SimpleNamespace(name="tardy")


def absent() -> str:
    return "no wings on this machine"


def entry(name: str, target: str, operation: str = "linear", provider: str = "cuda") -> KernelEntry:
    return KernelEntry(name, "S.", f"{HERE}:{target}", provider=provider, operation=operation)


@pytest.fixture
def plugins() -> PluginManager:
    manager = PluginManager()
    entries = [entry("absent", "absent"), entry("swift", "swift"), entry("tardy", "tardy")]
    entries.append(entry("other", "swift", "attention", "rocm"))
    manager.register(SimpleNamespace(vime_kernels=hookimpl(lambda: entries)), PluginInfo("fixture", "fixture", "1"))
    assert not manager.broken()
    return manager


def section(**given: str) -> AlignmentSection:
    return AlignmentSection.model_validate({"provider": "cuda", **given})


def test_auto_the_default_takes_what_is_offered_to_the_provider_and_own_takes_nothing(plugins: PluginManager) -> None:
    auto = choose_offered(section(linear="auto", attention="auto"), plugins)
    assert [(each.operation, each.name, each.required) for each in auto] == [
        ("linear", "absent", False),
        ("linear", "swift", False),
        ("linear", "tardy", False),
    ]
    assert choose_offered(section(), plugins) == auto
    assert choose_offered(section(linear="own", attention="own"), plugins) == ()
    assert choose_offered(section(provider="cpu", linear="auto", attention="auto"), plugins) == ()
    (named,) = choose_offered(section(linear="swift"), plugins)
    assert named.required


@pytest.mark.parametrize("given", [{"linear": "swfit"}, {"attention": "swift"}, {"linear": "swift", "provider": "cpu"}])
def test_names_that_nothing_offers_are_refused(plugins: PluginManager, given: dict[str, str]) -> None:
    with pytest.raises(PolicyError, match=r"alignment\.\w+ = 'sw\w+': nothing offers a \w+ of that name"):
        choose_offered(section(**given), plugins)


def test_the_first_that_can_run_here_is_taken_and_the_others_say_why_not(plugins: PluginManager) -> None:
    offers = open_offers(choose_offered(section(linear="auto", attention="auto"), plugins))
    assert offers.linear is SWIFT
    assert offers.attention is None
    assert offers.absent == (("absent", "no wings on this machine"),)
    assert offers.required == frozenset()


def test_one_that_is_named_and_cannot_run_is_refused(plugins: PluginManager) -> None:
    with pytest.raises(PolicyError, match=r"alignment\.linear = 'absent' cannot run here: no wings"):
        open_offers(choose_offered(section(linear="absent"), plugins))
    assert open_offers(choose_offered(section(linear="swift"), plugins)).required == {"linear"}


def report(role: Role, kernels: dict[str, str], digest: str = "abc") -> ProcessReport:
    settings = {
        "contract": "dense/v1",
        "contract_digest": DENSE_V1.digest,
        "provider": "cuda",
        "provider_digest": digest,
        "kernels": kernels,
    }
    return ProcessReport(role, 0, 1, {}, settings, {}, {})


def test_sides_that_chose_other_kernels_for_one_call_do_not_start() -> None:
    alignment = Alignment(DENSE_V1, "cuda", "a:b", "c:d", offered=(Offered("linear", "swift", "e:f", required=False),))
    both, gradient = {"forward 8x8": "swift"}, {"input gradient 8x8": "own (swift differs at M = 1: 3 elements)"}
    require_same_contract(alignment, [report("trainer", {**both, **gradient}), report("rollout", both)])
    other = {"forward 8x8": "own (swift differs at M = 64: 1 elements)"}
    with pytest.raises(
        ContractViolation, match=r"rollout 0 computes forward 8x8 by 'own .* M = 64.*trainer 0 by 'swift'"
    ):
        require_same_contract(alignment, [report("trainer", both), report("rollout", other)])
    with pytest.raises(ContractViolation, match="provider_digest"):
        require_same_contract(alignment, [report("trainer", both), report("rollout", both, "abd")])
