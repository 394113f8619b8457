"""A real aligned engine for each structure: the same bits as a whole-sequence forward, whatever the company.

Faults are planted in the live engine; every one of them must show.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from aligned_reference import Reference, compare, unequal_bits
from safetensors.torch import load_file
from torch import Tensor

from vime_core.alignment import CONTRACT_SETTINGS, require_same_contract
from vime_core.backends import AlignedRollout, RolloutContext
from vime_core.errors import BackendError, ContractViolation, DataError, PolicyError
from vime_core.loop.weights import require_equal_weights
from vime_core.numerics import DENSE_V1, load_provider
from vime_core.record.digest import digest_tensors
from vime_core.types import Completion, KeptTokens, SampleRequest
from vime_vllm.aligned.effective import require_aligned
from vime_vllm.aligned.rollout import AlignedVllmRollout
from vime_vllm.aligned.verdicts import take_census
from vime_vllm.reports import process_reports

pytestmark = [pytest.mark.engine, pytest.mark.slow]
if find_spec("vllm") is None:
    pytest.fail("vLLM is not installed, so its tests cannot run", pytrace=False)

TESTING = "vime_vllm.aligned.testing"
MakeRequests = Callable[..., list[SampleRequest]]


@dataclass
class Live:
    """A running engine, what it was started from, and the reference with the weights that it should hold."""

    name: str
    rollout: AlignedVllmRollout
    context: RolloutContext
    reference: Reference
    requests: list[SampleRequest]

    def with_weights(self, weights: Mapping[str, Tensor]) -> Reference:
        return replace(self.reference, weights=weights)

    @contextmanager
    def fault(self, function: str, *args: Any) -> Iterator[None]:
        self.rollout.call(f"{TESTING}:{function}", *args)
        try:
            yield
        finally:
            self.rollout.call(f"{TESTING}:restore")

    def unequal(self, requests: list[SampleRequest] | None = None) -> int:
        requests = self.requests if requests is None else requests
        return compare(self.reference, requests, self.rollout.generate(requests)).unequal


@pytest.fixture(scope="module", params=["qwen3-bf16", "llama-fp32", "qwen2-bf16"])
def live(
    request: pytest.FixtureRequest,
    make_aligned: Callable[..., RolloutContext],
    model_of: Callable[[str], Path],
    opened: Callable[[RolloutContext], AbstractContextManager[Any]],
    requests_of: MakeRequests,
    shapes: dict[str, Any],
) -> Iterator[Live]:
    name = request.param
    directory = model_of(name)
    config = json.loads((directory / "config.json").read_text())
    context = make_aligned(directory, shapes[name].dtype)
    reference = Reference(load_provider("cpu"), config, load_file(directory / "model.safetensors"))
    with opened(context) as rollout:
        yield Live(name, rollout, context, reference, requests_of(24, config["vocab_size"]))


def same(left: list[Completion], right: list[Completion]) -> bool:
    """Equal tokens and bits."""
    return len(left) == len(right) and all(
        a.tokens == b.tokens and a.log_probs.tobytes() == b.log_probs.tobytes()
        for a, b in zip(left, right, strict=True)
    )


# What it reports


def test_it_says_which_contract_it_keeps_and_with_what(live: Live) -> None:
    core, worker = live.rollout.processes()
    assert {name: worker.settings[name] for name in CONTRACT_SETTINGS} == {
        "contract": "dense/v1",
        "contract_digest": DENSE_V1.digest,
        "provider": "cpu",
        "provider_digest": load_provider("cpu").digest,
    }
    assert "contract" not in core.settings
    trainer = replace(worker, role="trainer")
    require_same_contract(live.context.alignment, [trainer, core, worker])
    other = replace(trainer, settings={**worker.settings, "provider_digest": "another"})
    with pytest.raises(ContractViolation, match="provider_digest"):
        require_same_contract(live.context.alignment, [other, core, worker])


def test_it_says_which_modules_run(live: Live) -> None:
    worker = live.rollout.processes()[1]
    ran: dict[str, int] = worker.settings["census"]["ran"]
    layers = live.reference.config["num_hidden_layers"]
    assert worker.settings["census"]["foreign"] == []
    assert ran["vime_vllm.aligned.model.AlignedDecoder"] == 2
    output_layers = 0 if live.reference.config["tie_word_embeddings"] else 1
    assert ran["vime_vllm.aligned.modules.Linear"] == 2 * (4 * layers + output_layers)
    assert ran["vime_vllm.aligned.sampler.AlignedSampler"] == 2
    assert worker.settings["attention_backends"] == {"CUSTOM": layers}
    assert worker.settings["exceptions"] == []
    assert worker.settings["worker"].endswith("AlignedCpuWorker")
    assert worker.settings["model_runner_version"] == "V1"
    assert isinstance(live.rollout, AlignedRollout)


def test_it_holds_the_directory_s_weights(live: Live) -> None:
    require_equal_weights(digest_tensors(live.reference.weights.items()), live.rollout.weight_digests(), 0)


# Bits


def test_log_probs_are_those_of_a_whole_sequence_forward(live: Live) -> None:
    found = compare(live.reference, live.requests, completions := live.rollout.generate(live.requests))
    print(f"{live.name}: {found}")
    assert found.tokens >= 500
    assert found.spread > 0.5
    assert found.unequal == 0
    sampled = [(r, c) for r, c in zip(live.requests, completions, strict=True) if r.temperature > 0]
    other = compare(live.reference, *map(list, zip(*sampled, strict=True)), temperature_factor=1.01)  # type: ignore[arg-type]
    assert other.unequal > 0.9 * other.tokens, "a temperature that is 1 % off must show"


def test_top_k_and_top_p_are_scored_among_what_they_left(live: Live, requests_of: MakeRequests) -> None:
    vocabulary = live.reference.config["vocab_size"]
    for changes in ({"top_k": 7}, {"top_p": 0.8}, {"top_k": 40, "top_p": 0.6}):
        requests = requests_of(8, vocabulary, **changes, temperature=0.9)
        completions = live.rollout.generate(requests)
        found = compare(live.reference, requests, completions)
        assert found.tokens > 100
        assert found.unequal == 0
        pairs = zip(requests, completions, strict=True)
        assert [c.kept for c in completions] == [left(live.reference, *pair) for pair in pairs]
        free = [replace(request, top_k=0, top_p=1.0) for request in requests]
        assert compare(live.reference, free, completions).unequal > 50
        mixed = [requests[0], free[1], *requests[2:]]
        assert same([live.rollout.generate(mixed)[0]], [completions[0]])


def left(reference: Reference, request: SampleRequest, completion: Completion) -> KeptTokens:
    """What a mask made from the reference's logits leaves at each token."""
    first = len(request.prompt_tokens) - 1
    logits = reference.logits([*request.prompt_tokens, *completion.tokens])[first:-1]
    keep = reference.operations.keep_mask(logits, request.temperature, request.top_k, request.top_p)
    return KeptTokens(tuple(keep.nonzero()[:, 1].tolist()), tuple(keep.sum(-1).tolist()))


def test_nothing_is_said_to_be_left_where_nothing_is_cut(live: Live, requests_of: MakeRequests) -> None:
    requests = requests_of(4, live.reference.config["vocab_size"])
    requests = [replace(requests[0], temperature=0.0, top_k=3), *requests[1:]]
    assert {c.kept for c in live.rollout.generate(requests)} == {KeptTokens()}


def test_company_order_cache_and_chunks_change_no_bit(live: Live) -> None:
    rollout, requests = live.rollout, live.requests
    together = rollout.generate(requests)
    assert same([rollout.generate([request])[0] for request in requests[::3]], together[::3]), "alone"
    assert same(rollout.generate(requests[::-1]), together[::-1]), "in another order"
    cold = sum(rollout.cached_tokens())
    rollout.keep_prefix_cache(True)
    try:
        assert same(rollout.generate(requests), together), "with a warm cache"
        assert sum(rollout.cached_tokens()) > cold + 300
    finally:
        rollout.keep_prefix_cache(False)
    assert same(rollout.generate(requests[1::3]), together[1::3])
    assert sum(rollout.cached_tokens()) == 0, "the cache was dropped, and these have no common prefix"


def test_chunks_change_no_bit(live: Live) -> None:
    rollout, requests = live.rollout, [replace(r, temperature=0.0) for r in live.requests]
    whole = rollout.generate(requests)
    for limit in (24, 37):
        rollout.call("vime_vllm.testing:record_schedule")
        rollout.prefill_in_chunks(limit)
        try:
            with pytest.raises(PolicyError, match="comes in chunks"):
                rollout.generate(live.requests[:1])
            chunked = rollout.generate(requests)
            (steps,) = rollout.call("vime_vllm.testing:schedule")
        finally:
            rollout.prefill_in_chunks(0)
        assert max(map(sum, steps)) == limit
        assert len(steps) > 30
        assert same(chunked, whole)
    assert same(rollout.generate(requests), whole)


def test_scoring_a_sequence_as_a_prompt_gives_the_same_bits(live: Live) -> None:
    request = live.requests[12]
    assert request.temperature == 1.0
    (completion,) = live.rollout.generate([request])
    scores = live.rollout.prompt_log_probs((*request.prompt_tokens, *completion.tokens))
    assert len(scores) == len(request.prompt_tokens) + len(completion.tokens) - 1
    assert unequal_bits(scores[len(request.prompt_tokens) - 1 :], completion.log_probs) == 0
    live.rollout.keep_prefix_cache(True)
    assert same(live.rollout.generate([request]), [completion]), "the witness knows what scoring left in the cache"
    live.rollout.keep_prefix_cache(False)
    for tokens in ((5,), tuple(range(3, 300))):
        with pytest.raises(DataError):
            live.rollout.prompt_log_probs(tokens)


def test_a_group_with_one_prompt_and_equal_seeds_gives_equal_samples(live: Live) -> None:
    one = live.requests[4]
    group = [replace(one, sample_index=i, seed=s) for i, s in enumerate((9, 9, 10))]
    first, second, third = live.rollout.generate(group)
    assert first.tokens == second.tokens
    assert first.tokens != third.tokens


def changed(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Other weights of the same form: at least half of the elements differ."""
    generator = torch.Generator().manual_seed(1)
    new = {n: (t + 0.05 * torch.randn(t.shape, generator=generator)).to(t.dtype) for n, t in weights.items()}
    assert sum((new[n] != t).sum() for n, t in weights.items()) > 0.5 * sum(t.numel() for t in weights.values())
    return new


def test_after_an_update_the_bits_are_those_of_the_new_weights(live: Live) -> None:
    before = live.rollout.generate(live.requests)
    new = changed(live.reference.weights)
    require_equal_weights(digest_tensors(new.items()), live.rollout.update_weights(iter(new.items()), 1), 1)
    after = live.rollout.generate(live.requests)
    found = compare(live.with_weights(new), live.requests, after)
    assert found.tokens >= 500
    assert found.unequal == 0
    assert compare(live.reference, live.requests, after).unequal > 0.9 * found.tokens
    live.rollout.update_weights(iter(live.reference.weights.items()), 0)
    assert same(live.rollout.generate(live.requests), before)


# Taps


def expected_taps(live: Live, request: SampleRequest, completion: Completion) -> dict[str, Tensor]:
    seen: dict[str, Tensor] = {}
    live.reference.logits(
        [*request.prompt_tokens, *completion.tokens[:-1]], lambda name, rows: seen.update({name: rows.flatten(1)})
    )
    return seen


def first_unequal(live: Live, request: SampleRequest) -> str | None:
    """The name of the first tap of an engine that differs from the reference's, in the order of computation."""
    (completion,) = live.rollout.generate([request])
    expected = expected_taps(live, request, completion)
    taps = live.rollout.record_taps(request)
    for name, (positions, rows) in taps.items():
        if not torch.equal(rows, expected[name][positions]):
            return name
    return None


def test_taps_are_those_of_a_whole_sequence_forward(live: Live) -> None:
    request = live.requests[9]
    (completion,) = live.rollout.generate([request])
    expected = expected_taps(live, request, completion)
    taps = live.rollout.record_taps(request)
    length = len(request.prompt_tokens) + len(completion.tokens) - 1
    order = ["embedding", *(n for n in expected if n.startswith("layers.")), "final_norm", "logits"]
    assert list(taps) == order
    for name, (positions, rows) in taps.items():
        first = len(request.prompt_tokens) - 1 if name == "logits" else 0
        assert positions.tolist() == list(range(first, length))
        assert rows.dtype == expected[name].dtype
        assert torch.equal(rows, expected[name][positions]), name
    assert same(live.rollout.generate([request]), [completion]), "nothing records any more"


# Faults in the live engine


def test_one_ulp_of_one_weight_is_caught_and_named(live: Live) -> None:
    name = "model.layers.0.input_layernorm.weight"
    live.rollout.call("vime_vllm.testing:flip_bit", name, 77)
    try:
        assert live.unequal() > 0
        assert first_unequal(live, live.requests[0]) == "layers.0.input_norm"
        with pytest.raises(ContractViolation, match=name):
            require_equal_weights(digest_tensors(live.reference.weights.items()), live.rollout.weight_digests(), 0)
    finally:
        live.rollout.call("vime_vllm.testing:flip_bit", name, 77)
    assert live.unequal() == 0


@pytest.mark.parametrize(
    ("operation", "first"), [("swiglu", "layers.0.swiglu"), ("linear", "layers.0.q"), ("token_log_probs", None)]
)
def test_a_swapped_operation_is_caught_and_named(live: Live, operation: str, first: str | None) -> None:
    with live.fault("swap_operation", operation):
        assert live.unequal() > 0
        named = first_unequal(live, live.requests[0])
        assert named == first or (operation == "linear" and named is not None)
        worker = process_reports(live.rollout.engine, [])[1]
        assert "altered" in worker.settings["provider_digest"]
        with pytest.raises(ContractViolation, match="provider_digest"):
            require_same_contract(
                live.context.alignment, [replace(live.rollout.processes()[1], role="trainer"), worker]
            )
    assert live.unequal() == 0


def test_another_provider_in_one_place_is_caught_by_its_report(live: Live) -> None:
    with live.fault("swap_provider", "reference"):
        worker = process_reports(live.rollout.engine, [])[1]
        assert worker.settings["provider"] == "cpu, reference"


def test_a_changed_epsilon_is_caught_and_named(live: Live) -> None:
    eps = live.reference.config["rms_norm_eps"]
    with live.fault("change_eps", "model.layers.1.post_attention_layernorm", eps * 100):
        assert live.unequal() > 0
        assert first_unequal(live, live.requests[0]) == "layers.1.post_attention_norm"
    assert live.unequal() == 0


def test_a_foreign_page_that_is_read_is_caught(live: Live) -> None:
    requests = live.requests[1::3]
    right = live.rollout.generate(requests)
    with live.fault("read_foreign_page"):
        wrong = live.rollout.generate(requests)
    assert not same(wrong[:1], right[:1])
    assert compare(live.reference, requests, wrong).unequal > 0


def test_pages_of_others_are_never_read_and_own_ones_are(live: Live) -> None:
    with live.fault("poison_foreign_pages"):
        assert live.unequal() == 0
    requests = live.requests[1::3]  # no common prefix, so no common page
    right = live.rollout.generate(requests)
    with live.fault("poison_owned_page"):
        wrong = live.rollout.generate(requests)
    assert not same(wrong[:1], right[:1])
    assert same(wrong[1:], right[1:])


def test_a_stale_prefix_cache_is_caught(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    rollout, requests = live.rollout, [r for r in live.requests if len(r.prompt_tokens) > 60]
    new = changed(live.reference.weights)
    rollout.generate(requests)
    core = rollout.engine.llm.llm_engine.engine_core
    rollout.keep_prefix_cache(True)
    try:
        with monkeypatch.context() as planted:
            planted.setattr(core, "reset_prefix_cache", lambda *_: True)
            rollout.update_weights(iter(new.items()), 1)
            with pytest.raises(ContractViolation, match="prefix cache that the current weights never filled"):
                rollout.generate(requests)
            planted.setattr(rollout, "_witness", Unsuspecting())
            stale = compare(live.with_weights(new), requests, rollout.generate(requests))
        assert sum(rollout.cached_tokens()) > 0
        assert stale.unequal > 0
    finally:
        rollout.update_weights(iter(live.reference.weights.items()), 0)
        rollout.keep_prefix_cache(False)
    assert live.unequal() == 0


class Unsuspecting:
    """A witness that sees nothing."""

    def reset(self) -> None: ...

    def check(self, served: object) -> None: ...


def test_a_step_that_was_scheduled_ahead_and_thrown_away_is_in_no_tap(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vime_vllm.aligned import verdicts

    expected, collect = live.rollout.record_taps(live.requests[1]), verdicts.collect_taps

    def with_another(engine: Any) -> Any:
        taps = collect(engine)
        return {
            name: (torch.cat([positions, positions[-1:] + 1]), torch.cat([rows, rows[:1] + 1]))
            for name, (positions, rows) in taps.items()
        }

    monkeypatch.setattr(verdicts, "collect_taps", with_another)
    found = live.rollout.record_taps(live.requests[1])
    assert list(found) == list(expected)
    for name, (positions, rows) in expected.items():
        assert torch.equal(found[name][0], positions), name
        assert torch.equal(found[name][1], rows), name


def test_taps_that_do_not_reach_are_an_error(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    from vime_vllm.aligned import verdicts

    collect = verdicts.collect_taps

    def without_decode(engine: Any) -> Any:
        return {name: (positions[:-3], rows[:-3]) for name, (positions, rows) in collect(engine).items()}

    monkeypatch.setattr(verdicts, "collect_taps", without_decode)
    with pytest.raises(BackendError, match="positions"):
        live.rollout.record_taps(live.requests[1])
    monkeypatch.setattr(verdicts, "collect_taps", lambda engine: collect(engine) and {})
    with pytest.raises(BackendError, match="no tap was recorded"):
        live.rollout.record_taps(live.requests[1])


def test_a_temperature_that_vllm_would_replace_is_refused(live: Live) -> None:
    with pytest.raises(PolicyError, match="VIME-ALIGN-028"):
        live.rollout.generate([replace(live.requests[0], temperature=0.005)])


def test_zz_a_module_that_the_contract_does_not_know_is_refused_by_name(live: Live) -> None:
    """Last: the engine is spoilt."""
    live.rollout.call(f"{TESTING}:put_in", "model.layers.0.mlp.act", "aligned_foreign:Activation")
    take_census(live.rollout.engine)
    reports = process_reports(live.rollout.engine, [])
    assert reports[1].settings["census"]["foreign"] == ["aligned_foreign.Activation"]
    assert live.context.alignment is not None
    with pytest.raises(PolicyError, match=r"aligned_foreign\.Activation.*none of the contract's"):
        require_aligned(reports, live.context.alignment)
    assert live.unequal() > 0
    assert np.isfinite(live.rollout.generate(live.requests[:2])[0].log_probs).all()


def test_zzz_nothing_is_scored_with_weights_of_another_version_or_of_half_an_update(live: Live) -> None:
    """Almost the last: the rollout takes no update after this one."""
    tokens = live.requests[1].prompt_tokens
    live.rollout.call("vime_vllm.testing:mislabel", 9)
    with pytest.raises(ContractViolation, match="holds weight version 9"):
        live.rollout.prompt_log_probs(tokens)
    with pytest.raises(ContractViolation, match="was not sent"):
        live.rollout.update_weights(iter(list(live.reference.weights.items())[:-1]), 1)
    with pytest.raises(BackendError, match="prompt_log_probs: the engine holds no known weights"):
        live.rollout.prompt_log_probs(tokens)


def test_zzzz_an_engine_that_dies_while_it_records_taps_is_named(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Last, of course."""
    rollout, run = live.rollout, live.rollout._run

    def dying(requests: list[SampleRequest]) -> list[Any]:
        os.kill(rollout.engine.pids[-1], signal.SIGKILL)
        return run(requests)

    monkeypatch.setattr(rollout, "_version", 0)
    monkeypatch.setattr(rollout, "_run", dying)
    with pytest.raises(BackendError, match="died during generate"):
        rollout.record_taps(live.requests[1])
