"""What a contract gives the engine, and what it refuses by name before one is started."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vime_core.backends import RolloutContext
from vime_core.errors import PluginError, PolicyError
from vime_core.numerics import DENSE_V1, Contract
from vime_core.plugins.types import AlignedSide
from vime_vllm.aligned.arguments import RUNNER_VARIABLE, aligned_environment, prepare
from vime_vllm.aligned.registration import SIDE_VARIABLE, architecture
from vime_vllm.arguments import engine_arguments
from vime_vllm.options import VllmOptions
from vime_vllm.plugin import vime_aligned_sides

NAMES = {
    *("quantization", "enable_lora", "kv_cache_dtype", "disable_cascade_attn", "hf_overrides", "additional_config"),
    *(
        "block_size",
        "long_prefill_token_threshold",
        "compilation_config",
        "logits_processors",
        "enable_chunked_prefill",
    ),
    *("speculative_model", "async_scheduling"),
}
MakeAligned = Callable[..., RolloutContext]


def arguments(make: MakeAligned, *, cpu: bool = True, dtype: str = "bf16", **options: Any) -> dict[str, Any]:
    made = VllmOptions(**options)
    return engine_arguments(make(dtype=dtype, options=made), made, {}, cpu=cpu, known=NAMES)


@pytest.mark.parametrize("cpu", [True, False])
def test_the_engine_gets_class_worker_and_contract(make_aligned: MakeAligned, cpu: bool) -> None:
    given = arguments(make_aligned, cpu=cpu)
    name = architecture("vime_vllm.aligned.model:AlignedDecoder")
    assert given["hf_overrides"] == {"architectures": [name]}
    assert name == "Vime_vime_vllm_aligned_model_AlignedDecoder"
    assert given["worker_cls"].endswith("AlignedCpuWorker" if cpu else "AlignedGpuWorker")
    assert given["enforce_eager"] is True
    assert "compilation_config" not in given
    message = given["additional_config"]["vime_alignment"]
    assert Contract.from_json(message["contract"]) == DENSE_V1
    assert message["provider"] == "cpu"
    assert message["side"] == "vime_vllm.aligned.model:AlignedDecoder"
    json.dumps(message)


def test_without_a_contract_nothing_changes(make_aligned: MakeAligned) -> None:
    context = replace(make_aligned(options=VllmOptions()), alignment=None)
    given = engine_arguments(context, VllmOptions(), {}, cpu=True, known=NAMES)
    assert not {"hf_overrides", "additional_config"} & set(given)
    assert given["worker_cls"].endswith("PlainLinearWorker")


@pytest.mark.parametrize(
    ("options", "code", "name"),
    [
        ({"tensor_parallel_size": 2}, "020", "tensor_parallel_size = 2"),
        ({"engine_args": {"quantization": "fp8"}}, "021", "quantization = 'fp8'"),
        ({"engine_args": {"enable_lora": True}}, "022", "enable_lora = True"),
        ({"engine_args": {"kv_cache_dtype": "fp8"}}, "023", "kv_cache_dtype = 'fp8'"),
        ({"engine_args": {"kv_cache_dtype": "float32"}}, "023", "kv_cache_dtype = 'float32'"),
        *(
            ({"attention_backend": name}, "024", f"attention_backend = '{name}': the contract attends by its own")
            for name in ("FLASH_ATTN", "TRITON_ATTN", "FLASHINFER")
        ),
        ({"enforce_eager": False}, "024", "enforce_eager = False"),
        ({"engine_args": {"disable_cascade_attn": False}}, "025", "disable_cascade_attn = False"),
        ({"engine_args": {"hf_overrides": {"rope_theta": 1.0}}}, "025", "hf_overrides"),
        ({"engine_args": {"additional_config": {"x": 1}}}, "025", "additional_config"),
        ({"engine_args": {"logits_processors": ["a:b"]}}, "025", "logits_processors"),
        ({"engine_args": {"compilation_config": {"mode": 3}}}, "025", "compilation_config"),
        ({"engine_args": {"long_prefill_token_threshold": 8}}, "027", "long_prefill_token_threshold = 8"),
    ],
)
def test_options_that_break_it_are_refused_by_name(
    make_aligned: MakeAligned, options: dict[str, Any], code: str, name: str
) -> None:
    with pytest.raises(PolicyError, match=f"VIME-ALIGN-{code}") as caught:
        arguments(make_aligned, **options)
    assert name in str(caught.value)


@pytest.mark.parametrize(
    "engine_args",
    [
        {"quantization": None, "enable_lora": False, "hf_overrides": {}},
        {"kv_cache_dtype": "auto"},
        {"kv_cache_dtype": "bfloat16", "disable_cascade_attn": True},
        {"block_size": 24, "async_scheduling": False},
    ],
)
def test_options_that_change_no_bit_pass(make_aligned: MakeAligned, engine_args: dict[str, Any]) -> None:
    assert engine_args.items() <= {**arguments(make_aligned, engine_args=engine_args), "hf_overrides": {}}.items()


def test_the_cache_holds_the_model_s_dtype(make_aligned: MakeAligned) -> None:
    arguments(make_aligned, dtype="fp32", engine_args={"kv_cache_dtype": "float32"})


def test_prompts_in_chunks_are_no_trouble_on_a_gpu(make_aligned: MakeAligned) -> None:
    arguments(make_aligned, cpu=False, engine_args={"long_prefill_token_threshold": 8})


@pytest.mark.parametrize(("name", "value"), [("top_p", 0.9), ("top_k", 50)])
def test_truncated_sampling_may_report_every_token_that_was_left(
    make_aligned: MakeAligned, monkeypatch: pytest.MonkeyPatch, name: str, value: float
) -> None:
    options = VllmOptions()
    context = make_aligned(options=options, sampling={name: value})
    assert engine_arguments(context, options, {}, cpu=True, known=NAMES)["max_logprobs"] == -1
    monkeypatch.setenv(RUNNER_VARIABLE, "1")
    assert engine_arguments(context, options, {}, cpu=False, known=NAMES)["max_logprobs"] == -1


def test_the_environment_names_class_and_runner(make_aligned: MakeAligned, monkeypatch: pytest.MonkeyPatch) -> None:
    alignment = make_aligned().alignment
    assert alignment is not None
    monkeypatch.delenv(RUNNER_VARIABLE, raising=False)
    for cpu, runner in ((True, "0"), (False, "1")):
        given = aligned_environment(alignment, cpu=cpu)
        assert given == {SIDE_VARIABLE: "vime_vllm.aligned.model:AlignedDecoder", RUNNER_VARIABLE: runner}
    monkeypatch.setenv(RUNNER_VARIABLE, "0")
    assert aligned_environment(alignment, cpu=False)[RUNNER_VARIABLE] == "0"
    monkeypatch.setenv(RUNNER_VARIABLE, "1")
    with pytest.raises(PolicyError, match=RUNNER_VARIABLE):
        aligned_environment(alignment, cpu=True)


def test_decode_steps_are_graphs_where_the_provider_allows_it(make_aligned: MakeAligned) -> None:
    for provider, eager, cpu, expected in (
        ("cuda", None, False, False),
        ("cuda", True, False, True),
        ("reference", None, False, True),
        ("cpu", None, True, True),
    ):
        options = VllmOptions(enforce_eager=eager)
        context = make_aligned(options=options)
        assert context.alignment is not None
        context = replace(context, alignment=replace(context.alignment, provider=provider))
        given = engine_arguments(context, options, {"async_scheduling": False}, cpu=cpu, known=NAMES)
        assert given["enforce_eager"] is expected
        assert given.get("async_scheduling") is (None if provider == "cuda" else False)
        assert ("compilation_config" in given) is not expected


def test_decode_graphs_of_as_many_requests_as_are_asked_for(make_aligned: MakeAligned) -> None:
    """vLLM makes the sizes of its graphs from max_num_seqs; none is given, and no argument of ours bounds them."""
    options = VllmOptions(max_num_seqs=256)
    context = make_aligned(options=options)
    assert context.alignment is not None
    context = replace(context, alignment=replace(context.alignment, provider="cuda"))
    given = engine_arguments(context, options, {}, cpu=False, known=NAMES)
    assert given["max_num_seqs"] == 256
    assert given["compilation_config"] == {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    assert "max_num_batched_tokens" not in given


def config_json(directory: Path, **changes: Any) -> Path:
    config = {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "vocab_size": 100,
    }
    (directory / "config.json").write_text(json.dumps({**config, **changes}))
    return directory


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "use_sliding_window = True"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "'dynamic'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]}, "model_type = 'gemma2'"),
    ],
)
def test_a_configuration_that_it_does_not_cover_is_refused_by_name(
    make_aligned: MakeAligned, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    alignment = make_aligned().alignment
    assert alignment is not None
    prepare(alignment, config_json(tmp_path))
    with pytest.raises(PolicyError, match=message):
        prepare(alignment, config_json(tmp_path, **changes))


def test_provider_and_class_that_are_not_there_are_refused(make_aligned: MakeAligned, tmp_path: Path) -> None:
    alignment = make_aligned().alignment
    assert alignment is not None
    with pytest.raises(PolicyError, match="'abacus': there is no numerics provider"):
        prepare(replace(alignment, provider="abacus"), config_json(tmp_path))
    with pytest.raises(PluginError, match="no_such_module"):
        prepare(replace(alignment, rollout_side="no_such_module:Model"), tmp_path)


def test_the_plugin_offers_the_side_of_dense_v1() -> None:
    (side,) = vime_aligned_sides()
    assert isinstance(side, AlignedSide)
    assert (side.backend, side.contract, side.structures) == ("vllm", "dense/v1", ("qwen2", "qwen3", "llama"))
    assert side.load().__name__ == "AlignedDecoder"
