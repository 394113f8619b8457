"""The engine's environment is what the policy and vime say, not what the trainer left behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from vime_core.config.schema import RunConfig
from vime_core.determinism.environment import deciding_environment
from vime_core.determinism.policy import OFF, REPRODUCIBLE, RolePolicy
from vime_core.errors import PolicyError
from vime_vllm.environment import OWNER, engine_environment, removed_variables
from vime_vllm.options import VllmOptions

MakeConfig = Callable[..., RunConfig]


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_OFFLINE", "TORCHDYNAMO_DISABLE", "PYTHONFAULTHANDLER"):
        monkeypatch.delenv(name, raising=False)
    for name in ("VLLM_PLUGINS", "VLLM_CPU_KVCACHE_SPACE", "VLLM_LOGGING_LEVEL", "VLLM_NO_USAGE_STATS"):
        monkeypatch.delenv(name, raising=False)


def _environment(config: RunConfig, *, compiler: bool = False) -> dict[str, str]:
    return engine_environment(config, REPRODUCIBLE, compiler=compiler, owner=12)


def test_it_holds_the_policy_the_threads_and_the_engine_s_own(make_config: MakeConfig) -> None:
    wanted = _environment(make_config(threads=3))
    assert wanted["PYTHONHASHSEED"] == "0"
    assert wanted["OMP_NUM_THREADS"] == "3"
    assert wanted["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert wanted["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    assert wanted["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"
    assert wanted[OWNER] == "12"


def test_threads_that_nobody_set_are_vllm_s_to_bind(make_config: MakeConfig) -> None:
    wanted = _environment(make_config(threads=None))
    assert "VLLM_CPU_OMP_THREADS_BIND" not in wanted
    assert "OMP_NUM_THREADS" not in wanted


def test_an_eager_engine_compiles_nothing(make_config: MakeConfig) -> None:
    assert _environment(make_config())["TORCHDYNAMO_DISABLE"] == "1"
    assert "TORCHDYNAMO_DISABLE" not in _environment(make_config(), compiler=True)


def test_the_trainer_s_variables_are_removed(make_config: MakeConfig) -> None:
    config = make_config(threads=None)
    removed = removed_variables(config, REPRODUCIBLE, _environment(config))
    assert {"NCCL_ALGO", "CUBLAS_WORKSPACE_CONFIG", "OMP_NUM_THREADS"} <= removed
    assert "OMP_NUM_THREADS" not in removed_variables(make_config(), REPRODUCIBLE, _environment(make_config()))


def test_quiet_unless_the_user_says_otherwise(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _environment(make_config())["VLLM_LOGGING_LEVEL"] == "WARNING"
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    assert _environment(make_config())["VLLM_LOGGING_LEVEL"] == "DEBUG"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("VLLM_ENABLE_V1_MULTIPROCESSING", "0", "'0', but vime starts the engine with '1'"),
        ("VLLM_CPU_KVCACHE_SPACE", "40", "would override rollout.vllm.kv_cache_gib"),
        ("VLLM_PLUGINS", "another", "keeps vime's plugin out"),
        ("HF_HUB_OFFLINE", "0", "'0', but vime starts the engine with '1'"),
        ("TORCHDYNAMO_DISABLE", "0", "'0', but vime starts the engine with '1'"),
    ],
)
def test_a_variable_that_contradicts_is_an_error(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(PolicyError, match=name) as caught:
        engine_environment(make_config(), OFF, compiler=False, owner=12)
    assert said in caught.value.message


def test_a_variable_that_agrees_is_none(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "1")
    monkeypatch.setenv("VLLM_PLUGINS", "another, vime")
    _environment(make_config())


def test_reports_hold_what_decides_numbers_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.setenv("VLLM_SOMETHING_TOKEN", "secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("HOME_ADDRESS", "private")
    reported = deciding_environment()
    assert reported["OMP_NUM_THREADS"] == "1"
    assert "secret" not in reported.values()
    assert "private" not in reported.values()


def test_what_decides_no_number_is_the_user_s(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _environment(make_config())["PYTHONFAULTHANDLER"] == "1"
    monkeypatch.setenv("PYTHONFAULTHANDLER", "")
    monkeypatch.setenv("HF_HUB_OFFLINE", "TRUE")
    wanted = _environment(make_config())
    assert wanted["PYTHONFAULTHANDLER"] == ""


@pytest.mark.parametrize(
    "name",
    [
        *("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_CBWR", "KMP_BLOCKTIME", "OPENBLAS_CORETYPE"),
        *("TORCH_BLAS_PREFER_CUBLASLT", "TORCHINDUCTOR_FREEZING", "ATEN_CPU_CAPABILITY", "GLIBC_TUNABLES"),
    ],
)
def test_variables_that_change_bits_are_reported(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "planted")
    monkeypatch.setenv("VLLM_DIST_IDENT", "random")
    assert deciding_environment()[name] == "planted"
    assert "VLLM_DIST_IDENT" not in deciding_environment()


def test_batch_invariant_mode_is_the_user_s_or_the_policy_s_to_choose(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {name: make_config(VllmOptions(attention_backend=name)) for name in ("FLASH_ATTN", "FLASHINFER")}
    invariant = replace(OFF, rollout=RolePolicy(environment={"VLLM_BATCH_INVARIANT": "1"}))
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    _environment(asked["FLASHINFER"])
    assert engine_environment(asked["FLASH_ATTN"], invariant, compiler=False, owner=1)["VLLM_BATCH_INVARIANT"] == "1"
    with pytest.raises(PolicyError, match=r"VIME-ENV-069.*FLASHINFER.*VLLM_BATCH_INVARIANT"):
        engine_environment(asked["FLASHINFER"], invariant, compiler=False, owner=1)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    _environment(asked["FLASH_ATTN"])
    with pytest.raises(PolicyError, match="VIME-ENV-069"):
        _environment(asked["FLASHINFER"])
