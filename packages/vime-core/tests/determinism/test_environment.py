"""Variables by role, contradictions found before anything is set, and an exact environment for a child."""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from vime_core.determinism.environment import apply, decides, exactly, read_back, role_environment
from vime_core.determinism.policy import OFF, REPRODUCIBLE, RolePolicy
from vime_core.determinism.preflight import contradictions, forbidden, inert, preflight, probes, require
from vime_core.errors import PolicyError
from vime_core.findings import Finding


def config(trainer: int | None = None, rollout: int | None = None, output: str = ".") -> Any:
    from pathlib import Path

    return SimpleNamespace(
        trainer=SimpleNamespace(threads=trainer),
        rollout=SimpleNamespace(threads=rollout),
        run=SimpleNamespace(output=Path(output)),
    )


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for role in ("driver", "trainer", "rollout"):
        for name in REPRODUCIBLE.role(cast(Any, role)).environment:
            monkeypatch.delenv(name, raising=False)
    for name in filter(decides, list(os.environ)):
        monkeypatch.delenv(name)


def test_threads_are_part_of_a_role() -> None:
    assert role_environment(config(trainer=2), REPRODUCIBLE, "trainer")["OMP_NUM_THREADS"] == "2"
    assert "OMP_NUM_THREADS" not in role_environment(config(trainer=2), REPRODUCIBLE, "rollout")
    assert role_environment(config(), OFF, "trainer") == {}


def test_a_contradiction_names_variable_values_and_role(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(contradictions(config(), REPRODUCIBLE)) == []
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    assert list(contradictions(config(), REPRODUCIBLE)) == []
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    (finding,) = contradictions(config(), REPRODUCIBLE)
    assert (finding.code, finding.severity) == ("VIME-ENV-001", "error")
    assert "NCCL_ALGO = 'Tree', but the trainer process needs 'Ring'" in finding.message
    assert list(contradictions(config(), OFF)) == []


def test_a_finding_that_forbids_a_run_is_raised_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "12")
    with pytest.raises(PolicyError, match="PYTHONHASHSEED = '12'") as caught:
        require(preflight(config(), REPRODUCIBLE))
    assert "Unset PYTHONHASHSEED" in caught.value.remedy
    monkeypatch.delenv("PYTHONHASHSEED")
    require(preflight(config(), REPRODUCIBLE))


def test_a_forbidden_package_is_found_when_it_is_installed() -> None:
    policy = replace(REPRODUCIBLE, trainer=RolePolicy(forbidden_packages=("pluggy", "no-such-package")))
    (finding,) = forbidden(policy)
    assert finding.code == "VIME-ENV-002"
    assert finding.message.startswith("pluggy ")


def test_what_has_no_effect_is_said() -> None:
    policy = replace(REPRODUCIBLE, inert={"SOME_VARIABLE": "no_such_module", "OTHER": "json"})
    assert [finding.message for finding in inert(policy)] == ["SOME_VARIABLE has no effect here"]


def failing_probe(config: Any) -> list[Finding]:
    return [Finding("VIME-ENV-099", "error", "planted", "a test", "Nothing.")]


def test_the_probes_of_a_policy_run() -> None:
    import sys

    sys.modules.setdefault(__name__, SimpleNamespace(failing_probe=failing_probe))  # type: ignore[arg-type]
    policy = replace(OFF, rollout=RolePolicy(probes=(f"{__name__}:failing_probe",)))
    assert [finding.message for finding in probes(config(), policy)] == ["planted"]


def test_flash_attention_3_beside_transformer_engine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from vime_core.determinism import probes as module

    assert list(module.transformer_engine_attention(config())) == []
    monkeypatch.setattr(module, "installed_version", lambda _: "3.0")
    monkeypatch.setattr(module, "find_spec", lambda _: object())
    (finding,) = module.transformer_engine_attention(config())
    assert (finding.code, finding.severity) == ("VIME-ENV-005", "error")
    assert "flash_attn_3 3.0" in finding.message


def test_threads_that_are_not_written_down_are_pointed_out() -> None:
    found = [f for f in preflight(config(trainer=1), REPRODUCIBLE) if f.code == "VIME-ENV-006"]
    assert [finding.message for finding in found] == ["rollout.threads is not set"]


def test_a_child_gets_exactly_its_environment_and_ours_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEPT", "1")
    monkeypatch.setenv("REMOVED", "2")
    before = dict(os.environ)
    with exactly({"ADDED": "3", "KEPT": "4"}, removed=["REMOVED"]):
        assert read_back(["ADDED", "KEPT", "REMOVED"]) == {"ADDED": "3", "KEPT": "4", "REMOVED": ""}
    assert dict(os.environ) == before


def test_applied_values_are_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIME_TEST_VARIABLE", "old")
    apply({"VIME_TEST_VARIABLE": "new"})
    assert read_back(["VIME_TEST_VARIABLE"]) == {"VIME_TEST_VARIABLE": "new"}


def test_what_else_decides_bits_is_pointed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [f for f in preflight(config(1, 1), REPRODUCIBLE) if f.code == "VIME-ENV-007"] == []
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    monkeypatch.setenv("NCCL_ALGO", "Ring")  # the policy's own
    (finding,) = [f for f in preflight(config(1, 1), REPRODUCIBLE) if f.code == "VIME-ENV-007"]
    assert finding.message == "environment variable ONEDNN_MAX_CPU_ISA = 'AVX2' is set"
    require([finding])
