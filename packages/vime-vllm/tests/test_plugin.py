"""Discovery is cheap, and an absent or unsupported vLLM is one clear error."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from vime_core.errors import PluginError, PolicyError
from vime_core.plugins.types import RolloutEngine
from vime_vllm import compat, engine_plugin
from vime_vllm.environment import OWNER
from vime_vllm.options import VllmOptions
from vime_vllm.plugin import vime_rollouts


def _python(code: str, **environment: str) -> str:
    outcome = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert outcome.returncode == 0, outcome.stderr
    return outcome.stdout


def test_the_engine_is_registered_with_its_options() -> None:
    (entry,) = vime_rollouts()
    assert isinstance(entry, RolloutEngine)
    assert entry.name == "vllm"
    assert entry.options_class() is VllmOptions
    assert callable(entry.load())


@pytest.mark.parametrize("module", ["vime_vllm", "vime_vllm.plugin", "vime_vllm.options", "vime_vllm.engine_plugin"])
def test_discovery_imports_nothing_heavy(module: str) -> None:
    heavy = _python(f"import sys, {module}; print([m for m in ('torch', 'vllm', 'psutil') if m in sys.modules])")
    assert heavy.strip() == "[]"


def test_the_driver_does_not_import_vllm_before_it_opens_an_engine() -> None:
    assert _python("import sys, vime_vllm.rollout; print('vllm' in sys.modules)").strip() == "False"


def test_absent_vllm_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "find_spec", lambda name: None if name == "vllm" else find_spec(name))
    with pytest.raises(PluginError, match=r"not installed") as caught:
        compat.require_vllm()
    assert "vime-vllm[cpu]" in caught.value.remedy
    assert "vime-vllm[cuda]" in caught.value.remedy
    assert "0.26 to 0.32" in caught.value.remedy


@pytest.mark.parametrize("found", ["0.25.1", "0.33.0", "1.0.0", "of unknown version"])
def test_a_version_outside_the_range_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr(compat, "find_spec", lambda name: name)
    monkeypatch.setattr(compat, "_installed_version", lambda: found)
    with pytest.raises(PolicyError, match=f"vLLM {found} is installed, but vime-vllm supports 0.26 to 0.32"):
        compat.require_vllm()


@pytest.mark.parametrize("found", ["0.26.0", "0.26.0+cu130", "0.29.3", "0.32.0", "0.32.1rc1.dev7+g123"])
def test_versions_of_the_range_pass(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr(compat, "find_spec", lambda name: name)
    monkeypatch.setattr(compat, "_installed_version", lambda: found)
    assert compat.require_vllm() == found


def test_a_process_without_the_owner_variable_is_foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(OWNER, raising=False)
    assert not engine_plugin.is_engine_process()
    monkeypatch.setenv(OWNER, str(os.getpid()))
    assert not engine_plugin.is_engine_process(), "the driver itself"
    monkeypatch.setenv(OWNER, str(os.getppid()))
    assert engine_plugin.is_engine_process()


@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")
def test_registering_twice_in_a_foreign_vllm_adds_one_name_and_nothing_else() -> None:
    told = _python(
        "import vllm.v1.engine.core as core\n"
        "from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as factory\n"
        "before = set(factory._registry)\n"
        "from vime_vllm.engine_plugin import register\n"
        "register(); register()\n"
        "print(sorted(set(factory._registry) - before), hasattr(core.EngineCore, 'vime_report'))",
        VLLM_LOGGING_LEVEL="ERROR",
    )
    assert told.splitlines()[-1] == "['vime'] False"


def test_registering_survives_a_vllm_without_weight_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.factory", None)
    engine_plugin.register()
