"""Discovery, look-up, conflicts, broken plugins, allow-list and disabling."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from vime_core.errors import PluginError
from vime_core.plugins import Reward, TrainerBackend, hookimpl
from vime_core.plugins.manager import PluginInfo, PluginManager, PluginSelection


def _rewards(*names: str) -> SimpleNamespace:
    @hookimpl
    def vime_rewards() -> Iterator[Reward]:
        for name in names:
            yield Reward(name, f"Reward {name}.", "json:loads")

    return SimpleNamespace(vime_rewards=vime_rewards)


def _info(name: str) -> PluginInfo:
    return PluginInfo(name, f"dist-{name}", "1.2")


@pytest.fixture
def fake_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Install a distribution with a vime entry point: call it with (distribution, point name, module source)."""

    def install(distribution: str, name: str, source: str) -> None:
        module = distribution.replace("-", "_")
        (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / f"{module}-3.1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 3.1\n")
        (info / "entry_points.txt").write_text(f"[vime]\n{name} = {module}\n")
        monkeypatch.syspath_prepend(str(tmp_path))

    return install


def test_our_own_packages_are_found_and_whole() -> None:
    manager = PluginManager.discover()
    manager.require()
    assert {"core", "megatron", "vllm"} <= {info.name for info in manager.plugins()}


def test_discovery_imports_neither_torch_nor_a_backend() -> None:
    code = (
        "import sys; from vime_core.plugins.manager import PluginManager; PluginManager.discover().require();"
        "print(sorted({'torch','vllm','megatron','transformers','numpy.random'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_registration_is_found_by_kind_and_name() -> None:
    manager = PluginManager()
    manager.register(_rewards("a", "b"), _info("one"))
    assert manager.find(Reward, "b", field_name="reward.name").load() is __import__("json").loads


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    manager = PluginManager()
    manager.register(_rewards("exact"), _info("one"))
    with pytest.raises(PluginError, match=r"reward.name = 'exakt': no such reward. Known: exact") as caught:
        manager.find(Reward, "exakt", field_name="reward.name")
    assert "Did you mean 'exact'" in caught.value.remedy
    with pytest.raises(PluginError, match=r"no such trainer\. Known: none"):
        manager.find(TrainerBackend, "exact", field_name="trainer.backend")


def test_two_plugins_of_one_registration_are_a_conflict_that_names_both(fake_distribution) -> None:
    source = (
        "from vime_core.plugins import Reward, hookimpl\n"
        "@hookimpl\ndef vime_rewards():\n    yield Reward('same', 'Same.', 'json:loads')\n"
    )
    fake_distribution("first-dist", "first", source)
    fake_distribution("second-dist", "second", source)
    manager = PluginManager.discover()
    (conflict,) = manager.conflicts()
    for part in ("reward 'same'", "first-dist 3.1", "second-dist 3.1"):
        assert part in conflict.message
    with pytest.raises(PluginError, match="registered twice"):
        manager.require()
    PluginManager.discover(PluginSelection(disable=("second",))).require()


def test_two_distributions_with_one_plugin_name_are_a_conflict(fake_distribution) -> None:
    fake_distribution("first-dist", "twin", "")
    fake_distribution("second-dist", "twin", "")
    with pytest.raises(PluginError, match=r"plugin 'twin' is registered twice: by first-dist 3.1 .* second-dist 3.1"):
        PluginManager.discover().require()


def test_a_broken_plugin_is_listed_and_fatal_for_a_run(fake_distribution) -> None:
    fake_distribution("broken-dist", "broken", "import a_module_that_is_not_there")
    manager = PluginManager.discover()
    (info,) = manager.broken()
    assert (info.name, info.distribution) == ("broken", "broken-dist")
    assert "a_module_that_is_not_there" in info.error
    with pytest.raises(PluginError, match=r"'broken' of broken-dist 3\.1 failed to load: ModuleNotFoundError"):
        manager.require()
    PluginManager.discover(PluginSelection(disable=("broken",))).require()


def test_a_plugin_that_ends_the_process_is_broken_and_does_not_end_vime(fake_distribution) -> None:
    fake_distribution("quitting-dist", "quitting", "raise SystemExit(0)")
    manager = PluginManager.discover()
    assert manager.broken()[0].error == "SystemExit: 0"
    with pytest.raises(PluginError, match="'quitting' of quitting-dist"):
        manager.require()


def test_an_unknown_hook_breaks_the_plugin_by_name() -> None:
    @hookimpl
    def vime_rewardz() -> None:
        pass

    manager = PluginManager()
    manager.register(SimpleNamespace(vime_rewardz=vime_rewardz), _info("typo"))
    assert "vime_rewardz" in manager.broken()[0].error


def test_a_hook_that_yields_something_else_breaks_the_plugin() -> None:
    @hookimpl
    def vime_rewards() -> list[str]:
        return ["exact"]

    manager = PluginManager()
    manager.register(SimpleNamespace(vime_rewards=vime_rewards), _info("odd"))
    assert "'exact', which is no registration" in manager.broken()[0].error
    assert manager.of_kind(Reward) == []


def test_the_allow_list_keeps_the_others_out(fake_distribution) -> None:
    fake_distribution("extra-dist", "extra", "raise RuntimeError('must not be imported')")
    manager = PluginManager.discover(PluginSelection(allow=("core",)))
    manager.require()
    assert [info.name for info in manager.plugins()] == ["core"]


@pytest.mark.parametrize("selection", [PluginSelection(allow=("cor",)), PluginSelection(disable=("cor",))])
def test_a_selection_of_what_is_not_installed_is_an_error(selection: PluginSelection) -> None:
    with pytest.raises(PluginError, match="names 'cor', which is not installed"):
        PluginManager.discover(selection).require()


def test_an_absent_module_behind_a_target_is_one_clear_error() -> None:
    entry = Reward("r", "R.", "absent_module_xyz:thing")
    with pytest.raises(PluginError, match="plugin 'r' needs 'absent_module_xyz'") as caught:
        entry.load()
    assert caught.value.code == "VIME-PLUGIN-003"
    with pytest.raises(PluginError, match="has no 'thing'"):
        Reward("r", "R.", "json:thing").load()


def test_a_module_loads_as_a_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "local_plugin.py").write_text(
        "from vime_core.plugins import Reward, hookimpl\n"
        "@hookimpl\ndef vime_rewards():\n    yield Reward('local', 'Local.', 'json:loads')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    manager = PluginManager.discover(PluginSelection(modules=("local_plugin",)))
    assert manager.find(Reward, "local", field_name="reward.name").name == "local"
