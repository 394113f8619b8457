from __future__ import annotations

import subprocess
import sys

import pytest

from vime_core.plugins.manager import PluginInfo, PluginManager
from vime_core.plugins.types import ModelSource, ModelStructure, TrainerBackend
from vime_megatron import plugin


@pytest.fixture
def manager() -> PluginManager:
    made = PluginManager()
    made.register(plugin, PluginInfo("megatron", "vime-megatron", "0"))
    assert made.broken() == []
    return made


def test_everything_registered_loads(manager: PluginManager) -> None:
    for entry in manager.entries():
        entry.registration.load()
        entry.registration.options_class()
    assert [t.name for t in manager.of_kind(TrainerBackend)] == ["megatron"]
    assert [s.name for s in manager.of_kind(ModelStructure)] == ["llama", "qwen2", "qwen3"]
    assert {s.backend for s in manager.of_kind(ModelStructure)} == {"megatron"}
    assert [s.name for s in manager.of_kind(ModelSource)] == ["directory", "gguf", "random-qwen2"]


def test_discovery_and_options_import_nothing_heavy() -> None:
    code = (
        "import sys; from vime_megatron import plugin, options, trainer;"
        "from vime_megatron.sources import directory, gguf, random_qwen2;"
        "print(sorted({'torch', 'megatron', 'transformers', 'vllm'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.strip() == "[]"
