"""Can this run start? ``run``, ``--dry-run`` and ``doctor`` ask the same list of checks, and no engine is started.

Each obstacle is planted in a configuration that works, and must be found by name by both ways to ask: the one that
raises the first and the one that lists all.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from command import PLUGINS, no_traceback, vime

from vime_core.config.load import load_config
from vime_core.errors import VimeError
from vime_core.loop.preparation import Preparation
from vime_core.loop.readiness import examine_ready, require_ready
from vime_core.loop.sides import load_policy


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The checks set this process's variables, as a run does."""
    before = dict(os.environ)
    monkeypatch.syspath_prepend(str(PLUGINS))
    os.environ["OMP_NUM_THREADS"] = "1"
    yield
    os.environ.clear()
    os.environ.update(before)


def prepare(smoke: Path, tmp_path: Path, *overrides: str) -> Preparation:
    config, plugins = load_config([smoke], [f"run.output='{tmp_path / 'record'}'", *overrides])
    return Preparation(config, load_policy(config, plugins), plugins)


def obstacle(smoke: Path, tmp_path: Path, *overrides: str) -> str:
    """The obstacle as both ways to ask name it."""
    with pytest.raises(VimeError) as caught:
        require_ready(prepare(smoke, tmp_path, *overrides))
    listed = [f for f in examine_ready(prepare(smoke, tmp_path, *overrides)) if f.severity == "error"]
    assert caught.value.code in [finding.code for finding in listed]
    assert all(finding.remedy and finding.cause for finding in listed)
    return f"{caught.value}"


def test_a_run_that_can_start_has_no_obstacle(smoke: Path, tmp_path: Path) -> None:
    run = prepare(smoke, tmp_path)
    assert {f.severity for f in require_ready(run)} == {"info"}
    assert not (tmp_path / "record").exists()


OBSTACLES: list[tuple[list[str], list[str]]] = [
    (["model={source='directory', directory={path='/no/such/model'}}"], ["/no/such/model"]),
    (["data={source='jsonl', jsonl={path='/no/such/file'}}"], ["/no/such/file"]),
    (["data.reasoning-gym.task=chain_sun"], ["chain_sun", "chain_sum"]),
    (["evaluation={every=1, source='jsonl', jsonl={path='/no/such/evaluation'}}"], ["/no/such/evaluation"]),
    (["run.sinks=['console','jsonk']"], ["run.sinks = 'jsonk'", "'jsonl'"]),
    (["alignment.contract=dense/v2"], ["alignment.contract = 'dense/v2'", "'dense/v1'"]),
    (["alignment.contract=dense/v1", "trainer.megatron.spec=local"], ["VIME-ALIGN-030"]),
    (["alignment.contract=dense/v1", "rollout.vllm.engine_args.quantization=fp8"], ["VIME-ALIGN-021"]),
    (["alignment={contract='dense/v1', provider='cudaa'}"], ["alignment.provider = 'cudaa'", "cpu, cuda, reference"]),
    (["rollout.vllm.attention_backend=FLASH_ATN"], ["rollout.vllm.attention_backend = 'FLASH_ATN'", "'FLASH_ATTN'"]),
    (["rollout.vllm.attention_backend=auto"], ["rollout.vllm.attention_backend = 'auto'", "TRITON_ATTN"]),
    (["sampling.samples_per_prompt=1"], ["sampling.samples_per_prompt = 1"]),
    (["rollout.context_length=2048", "trainer.token_budget=2048"], ["context_length = 2048", "embeddings = 1024"]),
    (["sampling.stop_token_ids=[512]"], ["stop_token_ids holds 512", "0 to 511"]),
    (["sampling.stop_token_ids=[-1]"], ["stop_token_ids holds -1"]),
    (["trainer.megatron.data_parallel=2"], ["trainer.megatron.data_parallel = 2"]),
    (["rollout.vllm.engine_args.blok_size=16"], ["engine_args.blok_size", "'block_size'"]),
    (["rollout.vllm.max_num_batched_tokens=8"], ["max_num_batched_tokens = 8"]),
    (["sampling.temperature=0.001"], ["sampling.temperature = 0.001", "0.01"]),
    (["evaluation={every=1, temperature=0.005, max_tokens=8}"], ["evaluation.temperature = 0.005"]),
    (["evaluation={every=1, max_tokens=250}"], ["beside evaluation.max_tokens"]),
    (["run.output=/dev/full/record"], ["/dev/full", "no directory"]),
    (["run.output=/proc/record"], ["run.output = '/proc/record'"]),
    ([f"run.output='/tmp/{'x' * 300}'"], ["File name too long"]),
    (["plugins.modules=['rewards_that_fail']", "reward={name='takes-two'}"], ["takes-two", "positional argument"]),
    (["plugins.modules=['rewards_that_fail']", "reward={name='text'}"], ["not a number", "first prompt"]),
    (["plugins.modules=['rewards_that_fail']", "reward={name='no-factory'}"], ["no_such_factory"]),
]


@pytest.mark.parametrize(("overrides", "parts"), OBSTACLES, ids=lambda value: str(value[0])[:50])
def test_an_obstacle_is_named(overrides: list[str], parts: list[str], smoke: Path, tmp_path: Path) -> None:
    said = obstacle(smoke, tmp_path, *overrides)
    assert [part for part in parts if part not in said] == [], said


@pytest.mark.parametrize(
    ("key", "value"),
    [("max_position_embeddings", -3), ("vocab_size", "many"), ("hidden_size", 0), ("num_hidden_layers", True)],
)
def test_a_bad_model_configuration_is_no_fault_of_the_tokenizer(
    key: str, value: Any, smoke: Path, tmp_path: Path, tiny_model: Path
) -> None:
    strange = tmp_path / "model"
    shutil.copytree(tiny_model, strange)
    config = json.loads((strange / "config.json").read_text())
    (strange / "config.json").write_text(json.dumps({**config, key: value}))
    said = obstacle(smoke, tmp_path, f"model={{source='directory', directory={{path='{strange}'}}}}")
    assert f"{key} = {value!r}" in said
    assert "tokenizer" not in said


def test_a_record_that_exists(smoke: Path, tmp_path: Path) -> None:
    (tmp_path / "record").mkdir()
    assert "VIME-RECORD-001" in obstacle(smoke, tmp_path)


def warnings(run: Preparation) -> list[str]:
    return [finding.message for finding in require_ready(run) if finding.severity == "warning"]


def test_what_learns_nothing_is_warned_of(smoke: Path, tmp_path: Path) -> None:
    assert warnings(prepare(smoke, tmp_path)) == []
    (greedy,) = warnings(prepare(smoke, tmp_path, "sampling.temperature=0"))
    assert "sampling.temperature = 0" in greedy
    (repeated,) = warnings(prepare(smoke, tmp_path, "data.reasoning-gym.size=3"))
    assert "3 usable prompts and sampling.prompts_per_step = 4" in repeated


BAD_PLUGIN = """
from vime_core.plugins import DatasetSource, hookimpl
@hookimpl
def vime_datasets():
    yield DatasetSource("bad", "Raises.", "a_bad_dataset:open_it")
def open_it(options):
    raise RuntimeError("no connection")
"""


def test_a_plugin_that_raises_is_named(smoke: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_bad_dataset.py").write_text(BAD_PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    said = obstacle(smoke, tmp_path, "plugins.modules=['a_bad_dataset']", "data={source='bad'}")
    assert "dataset 'bad' of plugins.modules failed: RuntimeError: no connection" in said


def test_doctor_lists_all_and_the_others_refuse(smoke: Path, tmp_path: Path) -> None:
    sets = [
        *("--set", "sampling.samples_per_prompt=1", "--set", "run.sinks=['nowhere']"),
        *("--set", "data.reasoning-gym.task=chain_sun", "--set", f"run.output='{tmp_path}'"),
    ]
    ran = vime("doctor", smoke, "--json", *sets)
    assert ran.code == 1, ran.text
    codes = {finding["code"] for finding in ran.json["findings"] if finding["severity"] == "error"}
    assert codes == {"VIME-CONFIG-010", "VIME-PLUGIN-001", "VIME-DATA-006", "VIME-RECORD-001"}
    for more in ([], ["--dry-run"]):
        ran = vime("run", smoke, "--json", *more, *sets)
        no_traceback(ran)
        assert (ran.code, ran.json["error"]["code"]) == (2, "VIME-RECORD-001"), ran.text
    assert list(tmp_path.iterdir()) == []


def test_a_configuration_that_cannot_be_read_is_no_finding(tmp_path: Path) -> None:
    ran = vime("doctor", tmp_path / "absent.toml", "--json")
    assert (ran.code, ran.json["error"]["code"]) == (2, "VIME-CONFIG-001")


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a device")
def test_the_provider_cuda_without_a_device_is_named(smoke: Path, tmp_path: Path) -> None:
    said = obstacle(smoke, tmp_path, "alignment={contract='dense/v1', provider='cuda'}")
    assert "alignment.provider = 'cuda' needs Triton and an NVIDIA GPU" in said
