"""What a user gets wrong is answered with a code, the field, the value and the remedy, before any compute is spent.

Everything here goes through the command line. What needs a running engine is in `test_failing_runs.py`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from command import Ran, no_traceback, vime


def refused(ran: Ran, *parts: str, code: int = 2) -> None:
    """The command ended with the exit code, names every part, helps, and shows no traceback."""
    no_traceback(ran)
    assert ran.code == code, ran.text
    missing = [part for part in (*parts, "help:") if part not in ran.err]
    assert not missing, (missing, ran.err)


@pytest.fixture
def run_smoke(smoke: Path, tmp_path: Path):
    """Run the smoke configuration with overrides; the record must not come into being."""

    def run(*overrides: str, env: dict[str, str] | None = None) -> Ran:
        record = tmp_path / "record"
        sets = [part for override in overrides for part in ("--set", override)]
        ran = vime("run", smoke, "--output", record, *sets, env=env)
        assert not record.exists(), "a refused run left a record"
        return ran

    return run


def test_a_missing_configuration(tmp_path: Path) -> None:
    refused(vime("run", tmp_path / "absent.toml"), "VIME-CONFIG-001", "absent.toml")


def test_an_unknown_key(run_smoke) -> None:
    refused(run_smoke("sampling.max_tokenz=3"), "VIME-CONFIG-004", "sampling.max_tokenz", "sampling.max_tokens")


def test_a_wrong_type(run_smoke) -> None:
    refused(run_smoke("trainer.lr=fast"), "trainer.lr = 'fast'")


def test_a_missing_model_directory(run_smoke) -> None:
    ran = run_smoke("model={source='directory', directory={path='/no/such/model'}}")
    refused(ran, "/no/such/model")


def test_a_corrupt_model(run_smoke, tiny_model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny_model, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    ran = run_smoke(f"model={{source='directory', directory={{path='{broken}'}}}}")
    refused(ran, "model.safetensors")


def test_a_structure_that_nobody_registered(run_smoke, tiny_model: Path, tmp_path: Path) -> None:
    strange = tmp_path / "strange"
    shutil.copytree(tiny_model, strange)
    config = json.loads((strange / "config.json").read_text())
    (strange / "config.json").write_text(json.dumps({**config, "model_type": "strange9"}))
    ran = run_smoke(f"model={{source='directory', directory={{path='{strange}'}}}}")
    refused(ran, "VIME-CONFIG-011", "'strange9'", "qwen2", "vime_model_structures")


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (None, ["questions.jsonl"]),
        ("", ["questions.jsonl", "empty"]),
        ('{"question": "1+1?", "answer": "#### 2"}\n{"question": ', ["questions.jsonl", "line 2"]),
        ('{"frage": "1+1?", "antwort": "2"}\n', ["frage", "antwort"]),
    ],
    ids=["missing", "empty", "corrupt", "columns"],
)
def test_a_bad_dataset(content: str | None, parts: list[str], run_smoke, tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    if content is not None:
        file.write_text(content)
    refused(run_smoke(f"data={{source='jsonl', jsonl={{path='{file}'}}}}"), *parts)


def test_a_task_that_does_not_exist(run_smoke) -> None:
    ran = run_smoke("data.reasoning-gym.task=chain_sun")
    refused(ran, "chain_sun", "chain_sum")


def test_a_prompt_longer_than_the_context(run_smoke) -> None:
    refused(run_smoke("rollout.context_length=20"), "rollout.context_length", "tokens")


def test_an_environment_variable_that_contradicts_the_policy(run_smoke) -> None:
    ran = run_smoke(env={"NCCL_ALGO": "Tree"})
    refused(ran, "VIME-ENV-001", "NCCL_ALGO = 'Tree'", "'Ring'", "Unset NCCL_ALGO")


def test_threads_that_contradict_the_environment(run_smoke) -> None:
    refused(run_smoke("trainer.threads=2"), "OMP_NUM_THREADS = '1'", "'2'")


def test_a_record_that_exists_is_not_overwritten(smoke: Path, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("mine")
    refused(vime("run", smoke, "--output", tmp_path), "VIME-RECORD", str(tmp_path))
    assert (tmp_path / "manifest.json").read_text() == "mine"
    assert list(tmp_path.iterdir()) == [tmp_path / "manifest.json"]


def test_an_unknown_plugin(run_smoke) -> None:
    refused(run_smoke("trainer.backend=megatrom"), "trainer.backend = 'megatrom'", "'megatron'")


def test_a_plugin_that_fails_to_import(run_smoke) -> None:
    ran = run_smoke("plugins.modules=['a_plugin_that_is_not_there']")
    refused(ran, "VIME-PLUGIN-002", "a_plugin_that_is_not_there")


def test_two_plugins_of_one_name(run_smoke, tmp_path: Path) -> None:
    source = (
        "from vime_core.plugins import Reward, hookimpl\n"
        "@hookimpl\ndef vime_rewards():\n    yield Reward('exact', 'Another.', 'json:loads')\n"
    )
    (tmp_path / "another_exact.py").write_text(source)
    ran = run_smoke("plugins.modules=['another_exact']", env={"PYTHONPATH": str(tmp_path)})
    refused(ran, "reward 'exact' is registered twice", "vime-core", "another_exact")


def test_a_group_of_one_sample_has_no_advantage(run_smoke) -> None:
    refused(run_smoke("sampling.samples_per_prompt=1"), "sampling.samples_per_prompt = 1")


def test_errors_are_json_on_request(smoke: Path) -> None:
    ran = vime("run", smoke, "--set", "trainer.lr=fast", "--json")
    assert ran.code == 2
    assert ran.json["error"]["code"] == "VIME-CONFIG-007"
    assert "trainer.lr" in ran.json["error"]["message"]
    assert ran.json["error"]["help"]


def test_usage_errors_have_exit_code_two() -> None:
    ran = vime("run")
    assert ran.code == 2
    no_traceback(ran)
    ran = vime("no-such-command")
    assert ran.code == 2
    no_traceback(ran)


@pytest.mark.parametrize("command", ["diff", "verify repeat"])
def test_records_that_are_none(command: str, tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    second.mkdir()
    refused(vime(*command.split(), first, second), "VIME-RECORD", str(first))


def test_a_dry_run_prints_what_would_run_and_starts_nothing(smoke: Path, tmp_path: Path) -> None:
    import tomllib

    ran = vime("run", smoke, "--dry-run", "--set", "run.seed=99", "--output", tmp_path / "r\"'\\n")
    assert ran.code == 0, ran.text
    table = tomllib.loads(ran.out)
    assert table["run"]["seed"] == 99
    assert table["run"]["output"] == str(tmp_path / "r\"'\\n")
    assert table["trainer"]["megatron"] is not None
    assert list(tmp_path.iterdir()) == []


def test_the_doctor_names_every_obstacle(smoke: Path, tmp_path: Path) -> None:
    ran = vime("doctor", smoke, "--json", "--output", env={"NCCL_ALGO": "Tree", "PYTHONHASHSEED": "5"})
    assert ran.code == 2  # --output is no option of doctor
    ran = vime("doctor", smoke, "--json", env={"NCCL_ALGO": "Tree", "PYTHONHASHSEED": "5"})
    assert ran.code == 1, ran.text
    errors = [f for f in ran.json["findings"] if f["severity"] == "error"]
    assert {"NCCL_ALGO", "PYTHONHASHSEED"} == {f["message"].split()[2] for f in errors}
    assert all(f["code"] and f["cause"] and f["remedy"] for f in ran.json["findings"])
    assert vime("doctor", smoke).code == 0


def test_plugins_are_listed_without_importing_a_backend() -> None:
    ran = vime("plugins", "list", "--json")
    assert ran.code == 0, ran.text
    kinds = {(r["kind"], r["name"]) for r in ran.json["registrations"]}
    assert {("trainer", "megatron"), ("rollout", "vllm"), ("reward", "exact"), ("structure", "llama")} <= kinds
