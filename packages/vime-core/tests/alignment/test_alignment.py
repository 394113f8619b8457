"""One contract chosen for both sides, refused where a side is missing, and compared when it is read back."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from vime_core.alignment import Alignment, choose_alignment, require_same_contract
from vime_core.errors import ContractViolation, PluginError, PolicyError
from vime_core.numerics.contract import DENSE_V1
from vime_core.plugins import AlignedSide, ContractEntry, KernelEntry, hookimpl
from vime_core.plugins.manager import PluginInfo, PluginManager
from vime_core.types import ProcessReport, Role

ALIGNMENT = Alignment(DENSE_V1, "cpu", "a:b", "c:d")


def config(contract: str = "dense/v1") -> Any:
    return SimpleNamespace(
        alignment=SimpleNamespace(contract=contract, provider="cpu", linear="auto", attention="auto"),
        trainer=SimpleNamespace(backend="megatron"),
        rollout=SimpleNamespace(backend="vllm"),
    )


@pytest.fixture
def plugins() -> PluginManager:
    manager = PluginManager()
    sides = [
        AlignedSide("m", "M.", "a:b", backend="megatron", contract="dense/v1", structures=("qwen2", "llama")),
        AlignedSide("w", "W.", "e:f", backend="vllm", contract="sparse/v1", structures=("qwen2", "llama")),
        AlignedSide("v", "V.", "c:d", backend="vllm", contract="dense/v1", structures=("qwen2",)),
    ]
    contracts = [ContractEntry("dense/v1", "D.", "vime_core.numerics.contract:DENSE_V1")]
    plugin = SimpleNamespace(vime_aligned_sides=hookimpl(lambda: sides), vime_contracts=hookimpl(lambda: contracts))
    manager.register(plugin, PluginInfo("fixture", "fixture", "1"))
    return manager


def report(role: Role, **changes: str) -> ProcessReport:
    settings = {
        "contract": "dense/v1",
        "contract_digest": DENSE_V1.digest,
        "provider": "cpu",
        "provider_digest": "abc",
        **changes,
    }
    return ProcessReport(role, 0, 1, {}, settings, {}, {})


def bare(role: Role) -> ProcessReport:
    """A second process that installed no contract."""
    return ProcessReport(role, 1, 2, {}, {}, {}, {})


def test_both_sides_are_found(plugins: PluginManager) -> None:
    assert choose_alignment(config(), plugins, "qwen2") == ALIGNMENT
    assert choose_alignment(config(""), plugins, "qwen2") is None


def make_operations(contract: Any, provider: str) -> tuple[str, str]:
    return contract.id, provider


def test_a_contract_may_bring_its_own_operations() -> None:
    own = replace(ALIGNMENT, operations="builtins:no_such_name")
    with pytest.raises(PluginError, match="no_such_name"):
        own.load_operations()
    made = replace(ALIGNMENT, operations=f"{__name__}:make_operations").load_operations()
    assert made == ("dense/v1", "cpu")
    assert ALIGNMENT.load_operations().provider == "cpu"


def test_a_contract_with_operations_of_its_own_takes_no_kernels(plugins: PluginManager) -> None:
    own = ContractEntry(
        "own/v1", "O.", "vime_core.numerics.contract:DENSE_V1", operations=f"{__name__}:make_operations"
    )
    sides = [
        AlignedSide(b, "S.", "a:b", backend=b, contract="own/v1", structures=("qwen2",)) for b in ("megatron", "vllm")
    ]
    kernels = [KernelEntry("swift", "S.", f"{__name__}:make_operations", provider="cpu", operation="linear")]
    plugin = SimpleNamespace(
        vime_contracts=hookimpl(lambda: [own]),
        vime_aligned_sides=hookimpl(lambda: sides),
        vime_kernels=hookimpl(lambda: kernels),
    )
    plugins.register(plugin, PluginInfo("own", "own", "1"))
    asked = config("own/v1")
    alignment = choose_alignment(asked, plugins, "qwen2")
    assert alignment is not None
    assert alignment.offered == ()
    asked.alignment.linear = "swift"
    with pytest.raises(PolicyError, match="has operations of its own, which take no offered kernels"):
        choose_alignment(asked, plugins, "qwen2")


def test_a_side_that_does_not_cover_the_structure_is_refused_by_name(plugins: PluginManager) -> None:
    with pytest.raises(PolicyError, match=r"backend 'vllm' does not keep it for model_type 'llama'.*Covered.*: qwen2"):
        choose_alignment(config(), plugins, "llama")
    with pytest.raises(PluginError, match=r"alignment.contract = 'dense/v9'"):
        choose_alignment(config("dense/v9"), plugins, "qwen2")


def test_equal_reports_pass() -> None:
    require_same_contract(ALIGNMENT, [report("trainer"), report("rollout")])
    require_same_contract(None, [])


@pytest.mark.parametrize(
    ("reports", "part"),
    [
        ([report("trainer")], "no process of the rollout reports a contract"),
        ([], "no process of the trainer reports a contract"),
        ([report("trainer"), bare("trainer"), report("rollout")], "trainer 1 has contract = None"),
        ([report("trainer"), report("rollout", provider_digest="abd")], "rollout 0 has provider_digest = 'abd'"),
        ([report("trainer"), report("rollout", contract_digest="0")], "rollout 0 has contract_digest = '0'"),
        ([report("trainer", provider="reference"), report("rollout", provider="reference")], "provider = 'reference'"),
        ([report("trainer", contract="dense/v2"), report("rollout")], "trainer 0 has contract = 'dense/v2'"),
        ([report("trainer", provider_digest=""), report("rollout", provider_digest="")], "provider_digest = ''"),
    ],
)
def test_anything_else_is_a_violation(reports: list[ProcessReport], part: str) -> None:
    with pytest.raises(ContractViolation, match=part):
        require_same_contract(ALIGNMENT, reports)
