"""Discovery, look-up, conflicts, broken plugins, allow-list and disabling."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from blake3 import blake3

from vime_core.errors import BackendError, PluginError, PluginFailed
from vime_core.plugins import AlignedSide, MetricSink, ModelStructure, Registration, Reward, TrainerBackend, hookimpl
from vime_core.plugins.manager import PluginInfo, PluginManager, PluginSelection
from vime_core.plugins.types import EXTRAS


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


def test_an_absent_module_of_an_extra_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.delitem(sys.modules, "vime_core.sinks.wandb", raising=False)
    with pytest.raises(PluginError, match="plugin 'wandb' needs 'wandb'") as caught:
        MetricSink("wandb", "W.", "vime_core.sinks.wandb:open_sink").load()
    assert caught.value.remedy == "Install it with: pip install 'vime-core[wandb]', or choose another plugin."


def test_extras_bring_what_is_said() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    for module, extra in EXTRAS.items():
        brought = [line.partition(">")[0] for line in project["optional-dependencies"][extra]]
        assert module.replace("_", "-") in brought, module


def test_an_absent_module_behind_a_target_is_one_clear_error() -> None:
    entry = Reward("r", "R.", "absent_module_xyz:thing")
    with pytest.raises(PluginError, match="plugin 'r' needs 'absent_module_xyz'") as caught:
        entry.load()
    assert caught.value.code == "VIME-PLUGIN-003"
    assert caught.value.remedy.startswith("Install the package that provides 'absent_module_xyz'")
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


LOCAL = (
    "from vime_core.plugins import Reward, hookimpl\n"
    "@hookimpl\ndef vime_rewards():\n    yield Reward('local', 'Local.', 'json:loads')\n"
)


def test_a_module_beside_the_configuration_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "beside_plugin.py").write_text(LOCAL)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(PluginError, match=r"'beside_plugin' of plugins\.modules failed to load: Module") as caught:
        PluginManager.discover(PluginSelection(modules=("beside_plugin",))).require()
    assert "beside the configuration file" in caught.value.remedy
    selection = PluginSelection(modules=("beside_plugin",), directories=(tmp_path,))
    PluginManager.discover(selection).find(Reward, "local", field_name="reward.name")
    assert sys.path[-1] == str(tmp_path), "at the end, so that it hides nothing"


def loaded_version(module: str, place: Path) -> str:
    sys.modules.pop(module, None)
    importlib.invalidate_caches()
    found = PluginManager.discover(PluginSelection(modules=(module,), directories=(place,)))
    found.require()
    return next(info.version for info in found.plugins() if info.name == module)


def test_a_modules_version_is_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / "edited_plugin.py"
    file.write_text(LOCAL)
    first = loaded_version("edited_plugin", tmp_path)
    assert re.fullmatch(r"source [0-9a-f]{16}", first)
    assert loaded_version("edited_plugin", tmp_path) == first
    file.write_text(LOCAL + "\n# another line\n")
    assert loaded_version("edited_plugin", tmp_path) != first
    package = tmp_path / "edited_package"
    package.mkdir()
    (package / "__init__.py").write_text(LOCAL.replace("local", "packed"))
    before = loaded_version("edited_package", tmp_path)
    (package / "helper.py").write_text("ONE = 1\n")
    assert loaded_version("edited_package", tmp_path) != before


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The package of an installed distribution, in a namespace that others could share."""
    package = tmp_path / "shared_space" / "packed"
    (package / "kernels").mkdir(parents=True)
    for name in ("__init__.py", "reward.py", "kernels/add.cpp"):
        (package / name).write_text("")
    (package / "plugin.py").write_text(LOCAL.replace("local", "packed"))
    info = tmp_path / "packed_dist-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: packed-dist\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[vime]\npacked = shared_space.packed.plugin\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield package
    for name in [name for name in sys.modules if name.partition(".")[0] == "shared_space"]:
        del sys.modules[name]


def _sources(name: str) -> str:
    found = PluginManager.discover()
    found.require()
    return next(info.sources for info in found.plugins() if info.name == name)


@pytest.mark.parametrize("file", ["reward.py", "kernels/add.cpp", "words.txt", "kernels/deep/er.py"])
def test_a_distributions_sources_are_every_file_of_its_package(package: Path, file: str) -> None:
    first = _sources("packed")
    assert re.fullmatch(r"[0-9a-f]{64}", first)
    assert _sources("packed") == first
    (package / file).parent.mkdir(exist_ok=True)
    (package / file).write_text("ONE = 1\n")
    assert _sources("packed") != first


def test_a_moved_file_is_another_source(package: Path) -> None:
    first = _sources("packed")
    (package / "kernels" / "add.cpp").rename(package / "add.cpp")
    assert _sources("packed") != first


@pytest.mark.parametrize(
    "file",
    ["packed/__pycache__/reward.cpython-311.pyc", "packed/.hidden/reward.py", "packed/.reward.py.swp", "other.py"],
)
def test_caches_hidden_files_and_other_packages_are_no_sources(package: Path, file: str) -> None:
    first = _sources("packed")
    place = package.parent / file
    place.parent.mkdir(exist_ok=True)
    place.write_text("ONE = 1\n")
    assert _sources("packed") == first


def test_the_digest_of_sources_is_what_the_record_format_says(package: Path) -> None:
    total = blake3()
    for name in ["__init__.py", "kernels/add.cpp", "plugin.py", "reward.py"]:
        total.update(name.encode() + b"\0" + blake3((package / name).read_bytes()).digest())
    assert _sources("packed") == total.hexdigest()


def test_our_own_packages_and_single_files_have_sources(fake_distribution, tmp_path: Path) -> None:
    fake_distribution("single-dist", "single", LOCAL.replace("local", "single"))
    infos = {info.name: info for info in PluginManager.discover().plugins()}
    assert {"core", "megatron", "vllm", "glm5"} <= infos.keys()
    assert all(re.fullmatch(r"[0-9a-f]{64}", info.sources) for info in infos.values())
    first = infos["single"].sources
    (tmp_path / "neighbour.py").touch()
    assert _sources("single") == first
    (tmp_path / "single_dist.py").write_text(LOCAL.replace("local", "single") + "ONE = 1\n")
    assert _sources("single") != first


def test_disable_and_allow_hold_for_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "listed_plugin.py").write_text(LOCAL)
    monkeypatch.syspath_prepend(str(tmp_path))
    modules = ("listed_plugin",)
    disabled = PluginManager.discover(PluginSelection(disable=modules, modules=modules))
    disabled.require()
    assert "local" not in [reward.name for reward in disabled.of_kind(Reward)]
    with pytest.raises(PluginError, match=r"names 'listed_plugin', which plugins\.allow leaves out"):
        PluginManager.discover(PluginSelection(allow=("core",), modules=modules)).require()
    PluginManager.discover(PluginSelection(allow=("core", "listed_plugin"), modules=modules)).require()


def _registering(*entries: Registration) -> SimpleNamespace:
    @hookimpl
    def vime_model_structures() -> list[Registration]:
        return [entry for entry in entries if isinstance(entry, ModelStructure)]

    @hookimpl
    def vime_aligned_sides() -> list[Registration]:
        return [entry for entry in entries if isinstance(entry, AlignedSide)]

    return SimpleNamespace(vime_model_structures=vime_model_structures, vime_aligned_sides=vime_aligned_sides)


def _conflicts(first: Registration, second: Registration) -> list[str]:
    manager = PluginManager()
    manager.register(_registering(first), _info("one"))
    manager.register(_registering(second), _info("two"))
    return [error.message for error in manager.conflicts()]


def test_a_structure_of_two_backends_is_no_conflict() -> None:
    one, two, same = (ModelStructure("qwen9", "Q.", "json:loads", backend=backend) for backend in ("a", "b", "a"))
    assert _conflicts(one, two) == []
    (message,) = _conflicts(one, same)
    assert "structure 'qwen9 a' is registered twice" in message
    assert "dist-two" in message


def test_two_sides_for_one_contract_backend_and_structure_are_a_conflict() -> None:
    def side(name: str, backend: str, *structures: str) -> AlignedSide:
        return AlignedSide(name, "S.", "json:loads", backend=backend, contract="dense/v9", structures=structures)

    (message,) = _conflicts(side("x", "vllm", "qwen2", "llama"), side("y", "vllm", "llama"))
    for part in ("dense/v9 vllm llama", "dist-one", "dist-two"):
        assert part in message
    assert _conflicts(side("x", "vllm", "qwen2"), side("y", "vllm", "llama")) == []
    assert _conflicts(side("x", "vllm", "llama"), side("y", "megatron", "llama")) == []


@pytest.mark.parametrize("name", ["vime_rewards", "vime_after_step", "vime_rewardz"])
def test_a_hook_without_its_mark_is_reported(name: str, fake_distribution) -> None:
    fake_distribution(f"unmarked-{name}", "unmarked", f"def {name}(*a, **k):\n    return []\n")
    (info,) = PluginManager.discover().broken()
    assert f"{name} looks like a hook but is not marked with @hookimpl" in info.error


def test_a_distribution_without_a_name_is_listed(fake_distribution, tmp_path: Path) -> None:
    fake_distribution("nameless-dist", "nameless", "raise RuntimeError('planted')")
    next(tmp_path.glob("nameless*.dist-info/METADATA")).write_text("Metadata-Version: 2.1\n")
    (info,) = PluginManager.discover().broken()
    assert (info.distribution.startswith("nameless"), info.version) == (True, "of unknown version")


class _Raising:
    @hookimpl
    def vime_after_step(self) -> None:
        raise KeyError("planted")


class _Quiet:
    @hookimpl
    def vime_after_step(self, step: int) -> None:
        pass


def test_what_a_hook_raises_names_its_distribution() -> None:
    manager = PluginManager()
    manager.register(_Quiet(), _info("quiet"))
    manager.register(_Raising(), _info("raising"))
    manager.register(SimpleNamespace(vime_after_step=_Quiet.vime_after_step.__get__(_Quiet())), _info("third"))
    with pytest.raises(
        PluginFailed, match=r"hook vime_after_step of dist-raising 1.2 failed: KeyError: 'planted'"
    ) as e:
        manager.hook.vime_after_step(step=1, metrics={})
    assert (e.value.exit_code, e.value.code) == (3, "VIME-PLUGIN-007")
    assert "test_manager.py, line" in e.value.message


def test_what_fails_for_want_of_gpu_memory_says_what_needs_less_and_keeps_notes() -> None:
    manager = PluginManager()
    manager.register(_rewards("r"), _info("one"))
    (reward,) = manager.of_kind(Reward)
    used_up = RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 is full.")
    used_up.add_note("two steps are kept")
    with (
        pytest.raises(BackendError, match=r"reward 'r' of dist-one 1\.2 ran out of GPU memory: CUDA out of") as caught,
        manager.guarding(reward),
    ):
        raise used_up
    assert caught.value.__notes__ == ["two steps are kept"]


def test_what_a_registration_s_code_raises_names_its_distribution() -> None:
    manager = PluginManager()
    manager.register(_rewards("r"), _info("one"))
    (reward,) = manager.of_kind(Reward)
    with (
        pytest.raises(PluginFailed, match=r"reward 'r' of dist-one 1\.2 failed: SystemExit: 0"),
        manager.guarding(reward),
    ):
        sys.exit(0)
    with pytest.raises(PluginError, match="own"), manager.guarding(reward):
        raise PluginError("own", remedy="None.")


def test_a_target_whose_module_fails_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "failing_target.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(PluginError, match="'failing_target', which fails when it is imported: ZeroDivisionError"):
        Reward("r", "R.", "failing_target:make").load()
