"""The field's switches: what each becomes, and that nothing unknown is passed over."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vime_cli.flags import overrides_of, refuse_without_ray
from vime_cli.main import main
from vime_core.config.load import parse_override
from vime_core.errors import ConfigError

KEYS = {"attention_backend", "max_num_seqs"}
ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("arguments", "overrides"),
    [
        (["--deterministic-mode"], ["run.policy=reproducible"]),
        (["--vllm-enable-deterministic-inference"], ["run.policy=reproducible"]),
        (["--freeze-indexer"], ["trainer.megatron.freeze_indexer=true"]),
        (["--vllm-attention-backend", "FLASH_ATTN"], ["rollout.vllm.attention_backend=FLASH_ATTN"]),
        (["--vllm-max-num-seqs=8"], ["rollout.vllm.max_num_seqs=8"]),
        (["--vllm-swap-space", "4"], ["rollout.vllm.engine_args.swap_space=4"]),
        (
            ["--vllm-enable-x", "--vllm-max-num-seqs", "8"],
            ["rollout.vllm.engine_args.enable_x=true", "rollout.vllm.max_num_seqs=8"],
        ),
    ],
)
def test_a_switch_becomes_a_key(arguments: list[str], overrides: list[str]) -> None:
    assert overrides_of(arguments, KEYS) == overrides


@pytest.mark.parametrize("arguments", [["--lr", "1"], ["config.toml"], ["--deterministic-mode", "yes"], ["--vllm"]])
def test_what_is_no_switch_is_refused(arguments: list[str]) -> None:
    with pytest.raises(ConfigError, match=f"no option {arguments[0]}"):
        overrides_of(arguments, KEYS)


def test_a_runtime_environment_is_variables_of_the_actors() -> None:
    text = json.dumps({"env_vars": {"A": "1", "QUOTED": 'a"b\\c'}})
    (override,) = overrides_of(["--runtime-env-json", text], KEYS)
    table = parse_override(override)
    assert table == {"run": {"ray": {"env_vars": {"A": "1", "QUOTED": 'a"b\\c'}}}}
    assert overrides_of([f"--runtime-env-json={text}"], KEYS) == [override]
    refuse_without_ray([override], "ray")
    with pytest.raises(ConfigError, match="'inline' has none"):
        refuse_without_ray([override], "inline")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "no JSON"),
        ('{"working_dir": "."}', "only an object with the key env_vars"),
        ("[]", "only an object"),
        ('{"env_vars": {"A": 1}}', "an object of strings"),
    ],
)
def test_another_runtime_environment_is_refused(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        overrides_of(["--runtime-env-json", text], KEYS)


def test_vime_run_takes_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = [
        "run",
        str(ROOT / "configs" / "smoke.toml"),
        "--dry-run",
        "--json",
        "--output",
        str(tmp_path / "record"),
    ]
    switches = [
        "--set",
        "run.policy=off",
        "--deterministic-mode",
        "--vllm-max-num-seqs",
        "8",
        "--vllm-block-size",
        "16",
    ]
    monkeypatch.setattr("sys.argv", ["vime", *arguments, "--set", f"run.cache='{tmp_path}'", *switches])
    assert main() == 0
    table = json.loads(capsys.readouterr().out)
    assert table["run"]["policy"] == "reproducible"
    assert table["rollout"]["vllm"]["max_num_seqs"] == 8
    assert table["rollout"]["vllm"]["engine_args"] == {"block_size": 16}
