"""What reaches vLLM, and what is refused by name before anything starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from vime_core.backends import RolloutContext
from vime_core.determinism.policy import OFF, REPRODUCIBLE, DeterminismPolicy, RolePolicy
from vime_core.errors import ConfigError, PolicyError
from vime_vllm.arguments import CPU_WORKER, engine_arguments, policy_flags
from vime_vllm.options import DECIDED_ELSEWHERE, VllmOptions

KNOWN = {"block_size", "enable_chunked_prefill", "async_scheduling", "compilation_config", "generation_config"}
Make = Callable[..., RolloutContext]


def _arguments(context: RolloutContext, *, cpu: bool, policy: DeterminismPolicy = REPRODUCIBLE) -> dict[str, Any]:
    options = context.config.options("rollout", "vllm")
    assert isinstance(options, VllmOptions)
    return engine_arguments(context, options, policy_flags(policy), cpu=cpu, known=KNOWN)


def test_the_run_decides_precision_length_and_seed(make_context: Make) -> None:
    arguments = _arguments(make_context(), cpu=False)
    assert arguments["dtype"] == "bfloat16"
    assert arguments["max_model_len"] == 256
    assert arguments["seed"] == 7
    assert arguments["logprobs_mode"] == "processed_logprobs"
    assert arguments["weight_transfer_config"] == {"backend": "vime"}
    assert arguments["async_scheduling"] is False


def test_a_cpu_gets_whole_prompts_visible_weights_and_a_bounded_cache(make_context: Make) -> None:
    arguments = _arguments(make_context(), cpu=True)
    assert arguments["enable_chunked_prefill"] is False
    assert arguments["max_num_batched_tokens"] == 2048
    assert arguments["worker_cls"] == CPU_WORKER
    assert arguments["kv_cache_memory_bytes"] == 2 * 2**30
    assert arguments["enforce_eager"] is True
    assert "compilation_config" not in arguments


def test_a_context_longer_than_a_step_makes_the_step_longer_on_a_cpu(make_context: Make) -> None:
    context = make_context(context_length=4096)
    assert _arguments(context, cpu=True)["max_num_batched_tokens"] == 4096


def test_a_gpu_gets_decode_graphs_without_the_compiler_unless_told_otherwise(make_context: Make) -> None:
    assert _arguments(make_context(), cpu=False)["compilation_config"]["cudagraph_mode"] == "FULL_DECODE_ONLY"
    assert "compilation_config" not in _arguments(make_context(VllmOptions(enforce_eager=True)), cpu=False)
    own = VllmOptions(engine_args={"compilation_config": {"mode": 3}})
    assert _arguments(make_context(own), cpu=False)["compilation_config"] == {"mode": 3}


def test_other_engine_arguments_pass_through(make_context: Make) -> None:
    context = make_context(VllmOptions(engine_args={"block_size": 32}))
    assert _arguments(context, cpu=True)["block_size"] == 32


def test_an_unknown_engine_argument_is_refused_with_the_nearest_name(make_context: Make) -> None:
    with pytest.raises(ConfigError, match=r"engine_args\.blok_size") as caught:
        _arguments(make_context(VllmOptions(engine_args={"blok_size": 32})), cpu=True)
    assert "'block_size'" in caught.value.remedy


@pytest.mark.parametrize("name", sorted(DECIDED_ELSEWHERE))
def test_what_is_decided_elsewhere_is_refused_with_the_place(name: str) -> None:
    with pytest.raises(ValidationError, match=name) as caught:
        VllmOptions(engine_args={name: 1})
    assert DECIDED_ELSEWHERE[name] in str(caught.value)


def test_chunked_prefill_is_refused_on_a_cpu_only(make_context: Make) -> None:
    context = make_context(VllmOptions(engine_args={"enable_chunked_prefill": True}))
    assert _arguments(context, cpu=False)["enable_chunked_prefill"] is True
    with pytest.raises(ConfigError, match="enable_chunked_prefill = true"):
        _arguments(context, cpu=True)


def test_a_step_shorter_than_the_context_is_refused_on_a_cpu_only(make_context: Make) -> None:
    context = make_context(VllmOptions(max_num_batched_tokens=128))
    assert _arguments(context, cpu=False)["max_num_batched_tokens"] == 128
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens = 128 .*context_length = 256"):
        _arguments(context, cpu=True)


def test_an_engine_argument_may_not_contradict_the_policy(make_context: Make) -> None:
    context = make_context(VllmOptions(engine_args={"async_scheduling": True}))
    with pytest.raises(PolicyError, match=r"async_scheduling = True contradicts policy reproducible/v1"):
        _arguments(context, cpu=False)
    free = make_context(VllmOptions(engine_args={"async_scheduling": True}), OFF)
    assert _arguments(free, cpu=False, policy=OFF)["async_scheduling"] is True


def test_a_policy_flag_that_the_backend_does_not_have_is_refused_by_name() -> None:
    policy = DeterminismPolicy("site", 3, "", rollout=RolePolicy(flags={"batch_invariant": True}))
    with pytest.raises(PolicyError, match=r"site/v3 asks the rollout for 'batch_invariant'"):
        policy_flags(policy)


def test_a_policy_cannot_turn_seeds_off() -> None:
    policy = DeterminismPolicy("site", 3, "", rollout=RolePolicy(flags={"seed_per_request": False}))
    with pytest.raises(PolicyError, match="seed_per_request"):
        policy_flags(policy)


def test_gpus_of_an_engine_without_any_are_refused(make_context: Callable[..., RolloutContext]) -> None:
    with pytest.raises(ConfigError, match=r"gpus = \[1\], but the installed vLLM computes on the CPU"):
        _arguments(make_context(VllmOptions(gpus=(1,))), cpu=True)
