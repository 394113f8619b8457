"""A real engine, re-weighted online: everything that the rollout promises, and faults planted in the live engine."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor

from vime_core.backends import RolloutContext
from vime_core.errors import BackendError, ContractViolation, DataError, PolicyError
from vime_core.loop.weights import require_equal_weights
from vime_core.record.digest import digest_tensors, tensor_digest
from vime_core.types import Completion, SampleRequest
from vime_vllm import compat
from vime_vllm.memory import shared_memory_in_use
from vime_vllm.options import VllmOptions
from vime_vllm.reports import process_reports, require_effective
from vime_vllm.rollout import VllmRollout, open_rollout

pytestmark = [pytest.mark.engine, pytest.mark.slow]
if find_spec("vllm") is None:
    pytest.fail("vLLM is not installed, so its tests cannot run", pytrace=False)

BLOCK = 32
Weights = dict[str, Tensor]
MakeRequests = Callable[..., list[SampleRequest]]


@pytest.fixture(scope="module")
def rollout(
    make_context: Callable[..., RolloutContext],
    model_directory: Path,
) -> Iterator[VllmRollout]:
    """One engine for the whole module; a test that changes its weights puts them back."""
    context = make_context(VllmOptions(kv_cache_gib=0.25, engine_args={"block_size": BLOCK}), directory=model_directory)
    with pytest.MonkeyPatch.context() as driver:
        for name, value in context.policy.trainer.environment.items():
            driver.setenv(name, value)
        made = open_rollout(context)
    yield made
    made.close()


@pytest.fixture
def restored(rollout: VllmRollout, weights: Weights) -> Iterator[VllmRollout]:
    """The engine, with its first weights again after the test."""
    yield rollout
    rollout.update_weights(iter(weights.items()), 0)


def changed(weights: Weights, scale: float = 1.5) -> Weights:
    """Other weights of the same form."""
    generator = torch.Generator().manual_seed(1)
    return {n: (t * scale + 0.02 * torch.randn(t.shape, generator=generator)).to(t.dtype) for n, t in weights.items()}


def same(left: list[Completion], right: list[Completion]) -> bool:
    """Equal tokens and bit-equal log-probs."""
    return all(
        a.tokens == b.tokens and a.log_probs.tobytes() == b.log_probs.tobytes()
        for a, b in zip(left, right, strict=True)
    )


# What it reports


def test_it_reports_every_process_as_it_is(rollout: VllmRollout) -> None:
    core, worker = rollout.processes()
    assert {core.pid, worker.pid} == set(rollout.engine.pids)
    assert os.getpid() not in {core.pid, worker.pid}
    assert (core.settings["process"], worker.settings["process"]) == ("engine core", "worker")
    assert core.settings["scheduler"].endswith("Scheduler")
    assert core.settings["async_scheduling"] is False
    assert core.settings["chunked_prefill"] is False
    assert core.settings["prefix_caching"] is True
    assert core.settings["block_size"] == BLOCK
    assert core.settings["stop_token_ids"] == [2]
    assert worker.settings["model_class"].endswith("Qwen2ForCausalLM")
    assert worker.settings["attention_backends"] == {"CPU_ATTN": 2}
    assert worker.settings["model_runner_version"] == "V1"
    assert worker.settings["exceptions"] == ["cpu-plain-linear"]
    assert worker.settings["packed_layers"] == []
    assert worker.settings["threads"] == 1
    for report in (core, worker):
        assert report.role == "rollout"
        assert report.environment["OMP_NUM_THREADS"] == "1"
        assert report.environment["PYTHONHASHSEED"] == "0"
        assert report.environment["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
        assert report.versions["torch"].startswith("2.")
        assert report.hardware["cpu"]


def test_the_engine_does_not_inherit_the_trainer_s_variables(rollout: VllmRollout) -> None:
    for report in rollout.processes():
        assert not set(report.environment) & {"NCCL_ALGO", "CUBLAS_WORKSPACE_CONFIG", "CUDA_DEVICE_MAX_CONNECTIONS"}


def test_the_driver_s_environment_is_its_own_again(rollout: VllmRollout) -> None:
    assert "VLLM_WORKER_MULTIPROC_METHOD" not in os.environ
    assert rollout.processes()[0].environment["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"


def test_the_engine_s_own_process_writes_to_its_log(rollout: VllmRollout) -> None:
    assert "(EngineCore pid=" in rollout.engine.log.read_text()


# Generation


def test_completions_come_in_the_order_of_the_requests(rollout: VllmRollout, make_requests: MakeRequests) -> None:
    requests = make_requests(8)
    lengths = [24, 1, 17, 3, 9, 24, 2, 5]
    requests = [SampleRequest(**{**vars(r), "max_tokens": n}) for r, n in zip(requests, lengths, strict=True)]
    random.Random(3).shuffle(requests)
    completions = rollout.generate(requests)
    assert [c.key for c in completions] == [r.key for r in requests]
    for request, completion in zip(requests, completions, strict=True):
        assert completion.weight_version == 0
        assert completion.log_probs.dtype == np.float32
        assert completion.log_probs.shape == (len(completion.tokens),)
        assert (completion.log_probs < 0).all()
        if completion.finish_reason == "length":
            assert len(completion.tokens) == request.max_tokens
        else:
            assert completion.tokens[-1] == 2


def test_no_requests_no_completions(rollout: VllmRollout) -> None:
    assert rollout.generate([]) == []


def reference_log_probs(model: Any, request: SampleRequest, tokens: tuple[int, ...], temperature: float) -> Any:
    """Independent: transformers in fp32 over the whole sequence."""
    sequence = torch.tensor([[*request.prompt_tokens, *tokens]])
    with torch.no_grad():
        logits = model(sequence).logits[0, len(request.prompt_tokens) - 1 : -1]
    log_probs = torch.log_softmax(logits / temperature, -1)
    return log_probs.gather(-1, torch.tensor(tokens)[:, None])[:, 0].numpy()


@pytest.fixture(scope="module")
def reference(model_directory: Path) -> Any:
    from transformers import Qwen2ForCausalLM

    return Qwen2ForCausalLM.from_pretrained(model_directory, dtype=torch.float32)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_log_probs_are_of_the_distribution_that_was_sampled_from(
    rollout: VllmRollout, reference: Any, make_requests: MakeRequests, temperature: float
) -> None:
    requests = make_requests(temperature=temperature)
    differences: dict[float, list[float]] = {temperature: [], temperature + 0.3: []}
    for request, completion in zip(requests, rollout.generate(requests), strict=True):
        for candidate, found in differences.items():
            expected = reference_log_probs(reference, request, completion.tokens, candidate)
            found.extend(np.abs(expected - completion.log_probs).tolist())
    right, wrong = differences.values()
    assert len(right) > 50
    assert max(right) < 0.25, "bf16 against fp32"
    assert max(wrong) > 0.5, "the comparison would not notice another temperature"


def test_greedy_takes_the_most_likely_token_and_reports_it_at_temperature_one(
    rollout: VllmRollout, reference: Any, make_requests: MakeRequests
) -> None:
    (request,) = make_requests(1, temperature=0.0)
    (completion,) = rollout.generate([request])
    expected = reference_log_probs(reference, request, completion.tokens, 1.0)
    assert np.abs(expected - completion.log_probs).max() < 0.25
    sampled = rollout.generate([SampleRequest(**{**vars(request), "temperature": 1.0})])[0]
    assert completion.tokens != sampled.tokens


def test_equal_seeds_give_duplicates_and_other_seeds_do_not(rollout: VllmRollout, make_requests: MakeRequests) -> None:
    (one,) = make_requests(1)
    group = [SampleRequest(**{**vars(one), "sample_index": i, "seed": s}) for i, s in enumerate([5, 5, 6, 7])]
    first, second, *others = (c.tokens for c in rollout.generate(group))
    assert first == second
    assert len({first, *others}) == 3


def test_a_response_ends_with_a_stop_token(rollout: VllmRollout, make_requests: MakeRequests) -> None:
    (request,) = make_requests(1)
    (free,) = rollout.generate([request])
    place = next(i for i, token in enumerate(free.tokens) if token not in free.tokens[:i] and i >= 3)
    stopped = SampleRequest(**{**vars(request), "stop_token_ids": (free.tokens[place],)})
    (completion,) = rollout.generate([stopped])
    assert completion.tokens == free.tokens[: place + 1]
    assert completion.finish_reason == "stop"


def test_a_full_context_ends_a_response(rollout: VllmRollout, make_requests: MakeRequests) -> None:
    (request,) = make_requests(1, prompt_tokens=(7,) * 250, max_tokens=30)
    (completion,) = rollout.generate([request])
    assert len(completion.tokens) <= 6


@pytest.mark.parametrize("length", [0, 256, 300])
def test_a_prompt_that_does_not_fit_is_refused(rollout: VllmRollout, make_requests: MakeRequests, length: int) -> None:
    with pytest.raises(DataError, match=f"has {length} tokens"):
        rollout.generate(make_requests(1, prompt_tokens=(7,) * length))
    assert rollout.generate(make_requests(1)), "the engine is not hurt"


def test_the_front_end_does_not_ask_for_a_gpu(
    rollout: VllmRollout, make_requests: MakeRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = rollout.generate(make_requests())

    def fail(*args: Any) -> Any:
        raise AssertionError("the front-end asked for the current GPU")

    for name in ("current_device", "synchronize", "set_device"):
        monkeypatch.setattr(torch.cuda, name, fail)
    assert same(rollout.generate(make_requests()), expected)


# The composition of engine batches


def scheduled(rollout: VllmRollout, requests: list[SampleRequest]) -> tuple[list[Completion], list[list[int]]]:
    rollout.call("vime_vllm.testing:record_schedule")
    completions = rollout.generate(requests)
    (steps,) = rollout.call("vime_vllm.testing:schedule")
    return completions, steps


def test_paused_admission_fixes_the_schedule_whatever_the_delays(
    rollout: VllmRollout, make_requests: MakeRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests, enqueue, delays = make_requests(12), compat.enqueue, random.Random(5)
    completions, steps = scheduled(rollout, requests)
    assert len(steps[0]) == 12, "all requests are in the first engine step"

    def slowly(*args: Any) -> None:
        time.sleep(delays.random() * 0.03)
        enqueue(*args)

    monkeypatch.setattr(compat, "enqueue", slowly)
    for _ in range(2):
        again, same_steps = scheduled(rollout, requests)
        assert same_steps == steps
        assert same(again, completions)

    def after_the_first_step(*args: Any) -> None:
        enqueue(*args)
        while rollout.call("vime_vllm.testing:schedule") == [[]]:
            time.sleep(0.01)

    monkeypatch.setattr(compat, "enqueue", after_the_first_step)
    monkeypatch.setattr(rollout, "_paused_admission", False)
    _, other_steps = scheduled(rollout, requests)
    assert other_steps != steps, "without the pause the delays must show, or this test proves nothing"


def test_a_call_does_not_depend_on_the_calls_before_it(rollout: VllmRollout, make_requests: MakeRequests) -> None:
    requests = make_requests(4, prompt_tokens=tuple(range(3, 60)))
    _, steps = scheduled(rollout, requests)
    rollout.generate(make_requests(6))
    _, again = scheduled(rollout, requests)
    assert again == steps
    assert sum(steps[0]) < 4 * 57, "the group shares its prompt through the cache"


# Weights


def test_the_engine_starts_with_the_directory_s_weights(rollout: VllmRollout, weights: Weights) -> None:
    require_equal_weights(digest_tensors(weights.items()), rollout.weight_digests(), 0)


def test_an_update_changes_every_tensor_and_the_next_samples(
    restored: VllmRollout, weights: Weights, make_requests: MakeRequests
) -> None:
    before, old = restored.generate(make_requests()), restored.weight_digests()
    new = changed(weights)
    held = restored.update_weights(iter(new.items()), 3)
    assert list(held) == list(new), "in the order in which they were sent"
    require_equal_weights(digest_tensors(new.items()), held, 3)
    assert all(held[name] != old[name] for name in held)
    after = restored.generate(make_requests())
    assert {c.weight_version for c in after} == {3}
    assert not any(a.tokens == b.tokens for a, b in zip(before, after, strict=True))
    restored.update_weights(iter(weights.items()), 4)
    assert same(restored.generate(make_requests()), before)
    assert shared_memory_in_use() == []


def test_chunks_that_split_layers_arrive_whole(
    restored: VllmRollout, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vime_vllm import sender

    monkeypatch.setattr(sender, "CHUNK_BYTES", 100_000)
    new = changed(weights)
    shuffled = sorted(new.items(), key=lambda item: item[0][::-1])
    require_equal_weights(digest_tensors(new.items()), restored.update_weights(iter(shuffled), 1), 1)


def test_one_ulp_of_one_weight_shows(rollout: VllmRollout, weights: Weights) -> None:
    name = "model.layers.1.self_attn.k_proj.weight"
    before = rollout.weight_digests()
    rollout.call("vime_vllm.testing:flip_bit", name, 77)
    after = rollout.weight_digests()
    assert [n for n in before if before[n] != after[n]] == [name]
    flipped = weights[name].clone()
    flipped.view(torch.int16).view(-1)[77] ^= 1
    assert after[name] == tensor_digest(name, flipped), "kernels read what the digest says, element by element"
    rollout.call("vime_vllm.testing:flip_bit", name, 77)
    assert rollout.weight_digests() == before


def test_a_flipped_bit_reaches_the_samples(rollout: VllmRollout, make_requests: MakeRequests) -> None:
    before = rollout.generate(make_requests())
    rollout.call("vime_vllm.testing:flip_bit", "model.layers.0.mlp.down_proj.weight", 5)
    assert not same(rollout.generate(make_requests()), before)
    rollout.call("vime_vllm.testing:flip_bit", "model.layers.0.mlp.down_proj.weight", 5)
    assert same(rollout.generate(make_requests()), before)


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.self_attn.q_proj.weight"])
def test_an_update_that_the_engine_keeps_out_is_caught(restored: VllmRollout, weights: Weights, name: str) -> None:
    new = changed(weights)
    restored.call("vime_vllm.testing:keep_out", name)
    held = restored.update_weights(iter(new.items()), 5)
    restored.call("vime_vllm.testing:let_in")
    with pytest.raises(ContractViolation, match=name):
        require_equal_weights(digest_tensors(new.items()), held, 5)


@pytest.mark.parametrize("reload", [False, True])
def test_swapped_tensors_are_caught_and_named(restored: VllmRollout, weights: Weights, reload: bool) -> None:
    first, second = (f"model.layers.{layer}.mlp.down_proj.weight" for layer in (0, 1))
    new = changed(weights)
    if reload:
        restored.call("vime_vllm.testing:reload_layers", True)
    try:
        restored.call("vime_vllm.testing:swap", first, second)
        held = restored.update_weights(iter(new.items()), 5)
    finally:
        restored.call("vime_vllm.testing:let_in")
        if reload:
            restored.call("vime_vllm.testing:reload_layers", False)
    wanted = digest_tensors(new.items())
    assert [name for name in wanted if wanted[name] != held[name]] == [first, second]
    with pytest.raises(ContractViolation, match=first):
        require_equal_weights(wanted, held, 5)


def test_an_update_is_the_same_in_place_and_by_vllms_reload(
    restored: VllmRollout, weights: Weights, make_requests: MakeRequests
) -> None:
    assert restored.call("vime_vllm.testing:in_place") == [True]
    new = changed(weights)
    held = restored.update_weights(iter(new.items()), 1)
    samples = restored.generate(make_requests())
    restored.update_weights(iter(weights.items()), 2)
    restored.call("vime_vllm.testing:reload_layers", True)
    try:
        assert restored.call("vime_vllm.testing:in_place") == [False]
        assert restored.update_weights(iter(new.items()), 3) == held
    finally:
        restored.call("vime_vllm.testing:reload_layers", False)
    assert same(restored.generate(make_requests()), samples)


def test_a_packed_copy_hides_weights_and_is_reported(rollout: VllmRollout, make_requests: MakeRequests) -> None:
    """Why the plain linear is needed: stock packing makes a digest of the weight worthless."""
    layer, weight = "model.layers.0.mlp.down_proj", "model.layers.0.mlp.down_proj.weight"
    rollout.call("vime_vllm.testing:pack_layer", layer)
    before = rollout.generate(make_requests())
    rollout.call("vime_vllm.testing:flip_bit", weight, 5)
    assert same(rollout.generate(make_requests()), before), "the kernel reads another copy"
    with pytest.raises(PolicyError, match=layer):
        require_effective(process_reports(rollout.engine, []), _asked())
    rollout.call("vime_vllm.testing:unpack_layer", layer)
    assert not same(rollout.generate(make_requests()), before)
    rollout.call("vime_vllm.testing:flip_bit", weight, 5)
    require_effective(process_reports(rollout.engine, []), _asked())


def _asked(**changes: Any) -> Mapping[str, Any]:
    return {"enable_prefix_caching": True, "max_model_len": 256, "dtype": "bfloat16", **changes}


@pytest.mark.parametrize(
    ("name", "value"),
    [("enable_prefix_caching", False), ("attention_backend", "FLASH_ATTN"), ("async_scheduling", True)],
)
def test_a_setting_that_the_engine_did_not_take_is_caught(rollout: VllmRollout, name: str, value: object) -> None:
    require_effective(rollout.processes(), _asked(attention_backend="CPU_ATTN"))
    with pytest.raises(PolicyError, match="is effective"):
        require_effective(rollout.processes(), _asked(**{name: value}))


def test_a_stale_prefix_cache_would_change_samples_and_is_caught(
    restored: VllmRollout, weights: Weights, make_requests: MakeRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restored, "_drops_prefix_cache", False)  # else every call would, and no update had to
    requests = make_requests(2, prompt_tokens=tuple(range(3, 103)), temperature=0.0)
    new = changed(weights)
    restored.update_weights(iter(new.items()), 1)
    right = restored.generate(requests)
    restored.update_weights(iter(weights.items()), 2)
    restored.generate(requests)
    core = restored.engine.llm.llm_engine.engine_core
    with monkeypatch.context() as planted:
        planted.setattr(core, "reset_prefix_cache", lambda *_: True)
        restored.update_weights(iter(new.items()), 3)
        with pytest.raises(ContractViolation, match="prefix cache that the current weights never filled"):
            restored.generate(requests)
        planted.setattr(restored, "_witness", Unsuspecting())
        stale = restored.generate(requests)
    assert not same(stale, right), "the planted cache must matter, or the check above proves nothing"
    restored.update_weights(iter(new.items()), 4)
    assert same(restored.generate(requests), right)


class Unsuspecting:
    """A witness that sees nothing."""

    def reset(self) -> None: ...

    def check(self, served: object) -> None: ...


def test_a_prefix_cache_that_cannot_be_reset_is_an_error(
    rollout: VllmRollout, weights: Weights, make_requests: MakeRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([False, False, True])
    monkeypatch.setattr(rollout.engine.llm, "reset_prefix_cache", lambda: next(answers))
    rollout._drop_prefix_cache()
    monkeypatch.setattr(rollout.engine.llm, "reset_prefix_cache", lambda: False)
    monkeypatch.setattr("vime_vllm.rollout._RESET_PAUSE_S", 0.0)
    with pytest.raises(BackendError, match="could not be reset"):
        rollout._drop_prefix_cache()


def test_a_wrong_weight_version_is_caught(rollout: VllmRollout, make_requests: MakeRequests) -> None:
    rollout.call("vime_vllm.testing:mislabel", 9)
    with pytest.raises(ContractViolation, match="holds weight version 9, but the last update sent version 0"):
        rollout.generate(make_requests(1))
    rollout.call("vime_vllm.testing:mislabel", 0)
    rollout.generate(make_requests(1))


def test_an_update_whose_version_the_engine_did_not_take_is_caught(restored: VllmRollout, weights: Weights) -> None:
    restored.call("vime_vllm.testing:keep_version")
    try:
        with pytest.raises(ContractViolation, match="holds weight version 0, but the last update sent version 1"):
            restored.update_weights(iter(changed(weights).items()), 1)
        with pytest.raises(BackendError, match="no known weights"):
            restored.weight_digests()
    finally:
        restored.call("vime_vllm.testing:take_version")
        restored._version = 0


def test_a_version_that_the_engine_core_stamped_otherwise_is_caught(
    rollout: VllmRollout, make_requests: MakeRequests
) -> None:
    compat.set_weight_version(rollout.engine.llm, 8)
    with pytest.raises(ContractViolation, match="was generated with weight version 8, not 0"):
        rollout.generate(make_requests(1))
    compat.set_weight_version(rollout.engine.llm, 0)
    rollout.generate(make_requests(1))


def test_a_damaged_buffer_is_caught(
    rollout: VllmRollout, weights: Weights, make_requests: MakeRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    (name,) = rollout.call("vime_vllm.testing:damage_buffer")
    with pytest.raises(ContractViolation, match=name):
        rollout.update_weights(iter(weights.items()), 1)
    with pytest.raises(BackendError, match="no known weights"):
        rollout.generate(make_requests(1))
    rollout.call("vime_vllm.testing:mend_buffer")
    monkeypatch.undo()
    rollout._version = 0
    rollout.update_weights(iter(weights.items()), 0)


def test_zz_missing_weights_are_an_error_and_nothing_is_generated_after_it(
    rollout: VllmRollout, weights: Weights, make_requests: MakeRequests
) -> None:
    """Last of the updates, because the rollout takes no more after it."""
    partial = dict(list(weights.items())[:-1])
    with pytest.raises(ContractViolation, match="was not sent"):
        rollout.update_weights(iter(partial.items()), 1)
    for call in (lambda: rollout.generate(make_requests(1)), rollout.weight_digests):
        with pytest.raises(BackendError, match="no known weights"):
            call()


def test_zzz_close_leaves_nothing(rollout: VllmRollout) -> None:
    pids, log = rollout.engine.pids, rollout.engine.log
    assert all(psutil.pid_exists(pid) for pid in pids)
    rollout.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert not log.parent.exists()
    assert shared_memory_in_use() == []
    rollout.close()
    with pytest.raises(BackendError, match="has ended"):
        rollout.engine.on_workers("vime_weight_version")
