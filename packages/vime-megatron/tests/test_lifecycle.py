from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from vime_core.backends import TrainerContext
from vime_core.determinism.policy import OFF, REPRODUCIBLE, RolePolicy
from vime_core.errors import BackendError, ConfigError, PluginError, PolicyError
from vime_megatron import requirement
from vime_megatron.conversion.gguf import convert_gguf
from vime_megatron.options import MegatronOptions
from vime_megatron.sources.random_qwen2 import RandomQwen2Options, make_random_qwen2
from vime_megatron.testing import run_config
from vime_megatron.trainer import open_trainer


def converted(cache: Path) -> Path:
    (cache / "a.gguf").touch()
    return convert_gguf(cache / "a.gguf", cache / "out")


def test_a_trainer_leaves_the_process_as_it_was(llama: Path, open_at: Callable[..., Any]) -> None:
    def settings() -> tuple[Any, ...]:
        return (
            torch.are_deterministic_algorithms_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,
            torch.get_num_threads(),
            torch.distributed.is_initialized(),
            dict(os.environ),
        )

    before = settings()
    trainer = open_at(llama, run_config(threads=2))
    assert settings()[:4] == (True, False, 2, True)
    assert dict(os.environ) == before[4]
    trainer.close()
    assert settings() == before
    trainer.close()


def test_a_trainer_that_fails_to_open_leaves_nothing_either(llama: Path, open_at: Callable[..., Any]) -> None:
    config = run_config()
    too_long = config.model_copy(update={"rollout": config.rollout.model_copy(update={"context_length": 999})})
    with pytest.raises(ConfigError, match="999"):
        open_at(llama, too_long)
    assert not torch.distributed.is_initialized()
    assert not torch.are_deterministic_algorithms_enabled()
    open_at(llama)


def test_a_second_trainer_in_the_process_is_refused(llama: Path, open_at: Callable[..., Any]) -> None:
    first = open_at(llama)
    with pytest.raises(BackendError, match="already holds"):
        open_trainer(TrainerContext(run_config(), MegatronOptions(), REPRODUCIBLE, llama))
    assert torch.distributed.is_initialized()
    assert torch.are_deterministic_algorithms_enabled()
    assert len(list(first.weights())) > 0


def test_policy_flags_take_effect_and_are_read_back(llama: Path, open_at: Callable[..., Any]) -> None:
    (report,) = open_at(llama).processes()
    assert report.settings["deterministic_algorithms"] is True
    assert report.settings["deterministic_mode"] is True
    (report,) = open_at(llama, policy=OFF).processes()
    assert report.settings["deterministic_algorithms"] is False
    assert report.settings["deterministic_mode"] is False


def test_an_unknown_flag_is_refused_by_name(llama: Path, open_at: Callable[..., Any]) -> None:
    policy = replace(REPRODUCIBLE, trainer=RolePolicy(flags={"deterministic_algorithm": True}))
    with pytest.raises(PolicyError, match=r"'deterministic_algorithm'.*\n.*Did you mean 'deterministic_algorithms'"):
        open_at(llama, policy=policy)


def test_the_report_says_what_is_effective(
    llama: Path, open_at: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    (report,) = open_at(llama, run_config(dtype="bf16", threads=2)).processes()
    assert (report.role, report.rank, report.pid) == ("trainer", 0, os.getpid())
    assert report.environment["NCCL_ALGO"] == "Tree"
    assert set(report.environment) >= {*REPRODUCIBLE.trainer.environment, "OMP_NUM_THREADS"}
    assert report.environment["ONEDNN_MAX_CPU_ISA"] == "AVX2"
    assert report.settings["dtype"] == "bf16"
    assert report.settings["threads"] == 2
    assert report.settings["spec"] == "local"
    assert report.versions["megatron-core"].startswith("0.19.")
    assert report.versions["torch"] == torch.__version__
    assert report.hardware["cores"] >= 1


@pytest.mark.parametrize("key", ["tensor_parallel", "data_parallel"])
def test_more_ranks_than_the_launcher_holds_are_refused(key: str, llama: Path, open_at: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=rf"trainer.megatron.{key} = 2 .*'inline' holds 1"):
        open_at(llama, options=MegatronOptions(**{key: 2}))


@pytest.mark.parametrize(
    ("python", "command"),
    [
        ((3, 11), "pip install --no-deps --ignore-requires-python megatron-core==0.19.2"),
        ((3, 12), r"pip install 'vime-megatron\[megatron\]'"),
    ],
)
def test_absent_megatron_is_one_clear_error(
    python: tuple[int, int], command: str, llama: Path, open_at: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str) -> str:
        raise requirement.PackageNotFoundError(name)

    monkeypatch.setattr(requirement, "version", absent)
    monkeypatch.setattr(requirement.sys, "version_info", python)
    with pytest.raises(PluginError, match=command):
        open_at(llama)


def test_another_megatron_is_refused(llama: Path, open_at: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirement, "version", lambda _: "0.16.1")
    with pytest.raises(PluginError, match=r"megatron-core 0\.16\.1 is installed"):
        open_at(llama)


@pytest.mark.parametrize("needs", [lambda cache: make_random_qwen2(RandomQwen2Options(), cache), converted])
def test_absent_transformers_is_one_clear_error(
    needs: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str) -> str:
        raise requirement.PackageNotFoundError(name)

    monkeypatch.setattr(requirement, "version", absent)
    with pytest.raises(PluginError, match=r"needs transformers.*\n.*pip install 'vime-megatron\["):
        needs(tmp_path)
