"""Faults planted in a live engine or trainer: each is caught and named. The engines are small, the driver is real."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from fakes import CONTEXT, VOCABULARY, PlainRollout, make_sides, without_insides
from torch import Tensor

from vime_core.errors import BackendError, ConfigError, ContractViolation, NotFinite, PluginError
from vime_core.types import Completion, SampleRequest
from vime_core.verify.align_live import AlignOptions, verify_align
from vime_core.verify.live import first_requests
from vime_core.verify.verdict import Verdict


def run(sides: Any, **options: Any) -> Verdict:
    return verify_align(sides, AlignOptions(**{"longest": 1, **options}))


def ulp(row: Tensor, element: int = 0) -> Tensor:
    bits = {2: torch.int16, 4: torch.int32}[row.element_size()]
    other = row.clone()
    other.view(bits)[element] += 1
    return other


@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.0])
@pytest.mark.parametrize("layers", [False, True])
def test_two_sides_of_one_definition_hold(temperature: float, layers: bool) -> None:
    sides = make_sides(temperature)
    verdict = run(sides, layers=layers)
    assert verdict.exit_code == 0, verdict.sentence
    assert (verdict.coverage.steps, verdict.coverage.samples, verdict.coverage.tokens) == (3, 18, 108)
    assert verdict.coverage.tensors == 9 + (8 if layers else 0)
    assert verdict.changed is not None
    assert verdict.changed >= 0.5
    assert sides.rollout.version == 2


def test_sequences_reach_the_end_of_the_context() -> None:
    sides = make_sides()
    verdict = run(sides, longest=0)
    assert verdict.exit_code == 0, verdict.sentence
    assert verdict.coverage.longest == CONTEXT
    assert verdict.details["longest_position"] == CONTEXT - 1
    assert f"up to position {CONTEXT - 1} of {CONTEXT - 1}" in verdict.sentence
    ends = {len(r.prompt_tokens) + r.max_tokens for r in sides.rollout.calls[0]}
    assert {48, 64} <= ends  # a half is no longer than the run's own
    decoded = sides.rollout.calls[0][-1]
    assert decoded.max_tokens == CONTEXT - 3


def test_an_engine_that_is_wrong_late() -> None:
    sides = make_sides()
    sides.rollout.change = lambda name, place, row: ulp(row) if name.endswith("attention") and place >= 40 else row
    sides.rollout.change_row = lambda _all, one, row: row + bool(len(one.prompt_tokens) > 40) * torch.arange(VOCABULARY)
    assert run(sides).exit_code == 0
    verdict = run(make_sides_that_are_wrong(sides), longest=0)
    assert verdict.exit_code == 1
    assert "layer 0, attention, position 40, element 0" in verdict.sentence


def make_sides_that_are_wrong(sides: Any) -> Any:
    other = make_sides()
    other.rollout.change, other.rollout.change_row = sides.rollout.change, sides.rollout.change_row
    return other


def test_any_number_of_samples_is_trained_on() -> None:
    """Also one that is no whole number of groups."""
    verdict = run(make_sides(), samples=3, updates=1)
    assert verdict.exit_code == 0, verdict.sentence
    forwards = [len(phase["forwards"]) for phase in verdict.details["phases"]]
    assert forwards == [2, 1]


def test_more_samples_come_from_later_steps() -> None:
    verdict = run(make_sides(), samples=10, updates=1)
    assert (verdict.exit_code, verdict.coverage.samples) == (0, 20)
    requests = first_requests(make_sides().parts, 10)
    assert [r.prompt_index for r in requests] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert len({r.seed for r in requests}) == 10


def test_one_ulp_in_a_weight_of_the_engine() -> None:
    sides = make_sides()
    sides.rollout.held["mix.weight"] = ulp(sides.rollout.held["mix.weight"])
    verdict = run(sides)
    assert verdict.exit_code == 1
    assert verdict.first == "weight version 0, weight 'mix.weight'"


@pytest.mark.parametrize("change", [{"mix.weight": None}, {"extra.weight": "00"}], ids=["lacks one", "has one more"])
def test_an_engine_with_other_weights(change: dict[str, str | None]) -> None:
    sides = make_sides()
    honest = sides.rollout.weight_digests
    sides.rollout.weight_digests = lambda: {k: v for k, v in {**honest(), **change}.items() if v is not None}
    verdict = run(sides)
    assert (verdict.exit_code, verdict.first) == (1, f"weight version 0, weight {next(iter(change))!r}")


@pytest.mark.parametrize("lies", [False, True])
def test_one_tensor_that_is_not_updated(lies: bool) -> None:
    """Named by its digest; and where the digests lie, the log-probs still tell."""
    sides = make_sides()
    sides.rollout.keep_out = {"head.weight"}
    if lies:
        sides.rollout.weight_digests = lambda: dict(sides.initial_weights) if sides.rollout.version == 0 else honest()

        def honest() -> dict[str, str]:
            from vime_core.record.digest import digest_tensors

            return digest_tensors(sides.trainer.weights())

    verdict = run(sides)
    assert verdict.exit_code == 1
    if lies:
        assert verdict.first.startswith("weight version 1, prompt 0, sample 0, token ")
        assert "logits" in verdict.sentence
    else:
        assert verdict.first == "weight version 1, weight 'head.weight'"


def test_an_operation_swapped_in_the_engine() -> None:
    sides = make_sides()

    def swapped(name: str, position: int, row: Tensor) -> Tensor:
        return ulp(row, 3) if name == "layers.0.attention" and position >= 2 else row

    sides.rollout.change = swapped
    sides.trainer.change_scores = lambda scores: [score + np.float32(1e-3) for score in scores]
    verdict = run(sides, layers=True)
    assert verdict.exit_code == 1
    assert "layer 0, attention, position 2, element 3" in verdict.sentence
    assert "1 ulp apart; every tap before it is equal" in verdict.sentence
    assert "neither its batch nor its cache is the cause" in verdict.sentence


def test_taps_alone_find_what_log_probs_hide() -> None:
    sides = make_sides()
    sides.trainer.change = lambda name, position, row: ulp(row) if (name, position) == ("embedding", 1) else row
    assert run(sides).exit_code == 0
    verdict = run(make_sides_like(sides), layers=True)
    assert verdict.exit_code == 1
    assert "every log-prob is equal, but a tap is not" in verdict.sentence
    assert "embedding, position 1, element 0" in verdict.sentence


def make_sides_like(sides: Any) -> Any:
    other = make_sides()
    other.trainer.change = sides.trainer.change
    return other


def test_a_temperature_that_differs_by_one_percent() -> None:
    sides = make_sides(0.8)
    sides.rollout.temperature_factor = 1.01
    verdict = run(sides)
    assert verdict.exit_code == 1
    assert "the engine's log-probs belong to temperature 0.8080, the trainer's to 0.8000" in verdict.sentence
    assert "0.8000 was asked for" in verdict.sentence


def test_a_log_softmax_of_its_own() -> None:
    sides = make_sides()
    sides.trainer.change_scores = lambda scores: [np.nextafter(score, np.float32(0)) for score in scores]
    verdict = run(sides)
    assert verdict.exit_code == 1
    assert "both use one temperature, so their log-softmax differs" in verdict.sentence


def test_another_answer_in_company() -> None:
    sides = make_sides()

    def crowded(requests: Sequence[SampleRequest], one: SampleRequest, row: Tensor) -> Tensor:
        return row + 0.5 * torch.arange(VOCABULARY) / VOCABULARY if len(requests) > 3 and one.sample_index else row

    sides.rollout.change_row = crowded
    verdict = run(sides)
    assert verdict.exit_code == 1
    assert "alone and from an empty prefix cache the engine gives the trainer's bits" in verdict.sentence


def test_a_stale_prefix_cache() -> None:
    """The same prompts come again after the update, so a cache that was kept is found."""
    sides = make_sides()
    sides.rollout.resets_cache = False
    verdict = run(sides)
    assert verdict.exit_code == 1
    assert verdict.first.startswith("weight version 1, prompt 2, sample 0")
    assert "the engine gives the trainer's bits, so its answer depends on" not in verdict.sentence  # it never resets


def test_a_stale_prefix_cache_that_can_be_dropped() -> None:
    """Between the phases the cache is kept; the experiment drops it, and then the engine is right."""
    sides = make_sides()
    sides.rollout.keeps_cache = True
    verdict = run(sides)
    assert verdict.exit_code == 1
    assert "alone and from an empty prefix cache the engine gives the trainer's bits" in verdict.sentence


def test_an_engine_that_answers_otherwise_each_time() -> None:
    sides = make_sides()
    record = sides.rollout.record_taps

    def other(request: SampleRequest) -> Any:
        return record(replace(request, seed=request.seed + 1))

    sides.rollout.record_taps = other
    sides.trainer.change_scores = lambda scores: [score + np.float32(1e-3) for score in scores]
    assert "the engine gave another response" in run(sides).sentence


def relabelled(completions: list[Completion]) -> list[Completion]:
    """Answers as they finished, under the keys of the requests in order."""
    order = [2, 3, 0, 1, 4, 5] if len(completions) == 6 else list(range(len(completions)))
    keys = [(c.prompt_index, c.sample_index) for c in completions]
    return [
        replace(completions[i], prompt_index=key[0], sample_index=key[1]) for i, key in zip(order, keys, strict=True)
    ]


def test_answers_collected_as_they_finish() -> None:
    sides = make_sides()
    sides.rollout.change_completions = relabelled
    verdict = run(sides)
    assert verdict.exit_code == 1
    assert "those of this response under the prompt of prompt 1, sample 0" in verdict.sentence
    assert "collected in another order than they were asked for" in verdict.sentence


def dropped(completion: Completion) -> Completion:
    return replace(completion, tokens=completion.tokens[:-1])


CHANGES: dict[str, tuple[Any, str]] = {
    "completion order": (lambda done: done[::-1], "collection order, prompt 2, sample 1"),
    "duplicated sample": (lambda done: [done[0], done[0], *done[2:]], "duplicated sample, prompt 0, sample 0"),
    "missing sample": (lambda done: done[1:], "missing sample, prompt 0, sample 0"),
    "dropped token": (lambda done: [dropped(done[0]), *done[1:]], "dropped token, prompt 0, sample 0"),
    "wrong weight version": (
        lambda done: [replace(one, weight_version=7) for one in done],
        "weight version, prompt 0, sample 0",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_planted_in_the_engine(name: str) -> None:
    change, place = CHANGES[name]
    sides = make_sides()
    sides.rollout.change_completions = lambda done: change(done) if len(done) > 1 else done
    verdict = run(sides)
    assert (verdict.exit_code, verdict.first) == (1, f"weight version 0, {place}")
    assert sides.trainer.calls == 0  # nothing was trained on such samples


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (lambda scores: [scores[0][:-1], *scores[1:]], "dropped token, prompt 0, sample 0"),
        (lambda scores: scores[:-1], "missing sample, prompt 2, sample 1"),
    ],
)
def test_planted_in_the_trainer(change: Any, place: str) -> None:
    sides = make_sides()
    sides.trainer.change_scores = change
    verdict = run(sides)
    assert (verdict.exit_code, verdict.first) == (1, f"weight version 0, {place}")


def poison(row: Any) -> Any:
    row = row.copy()
    row[1] = np.nan
    return row


@pytest.mark.parametrize("sides_with_nan", [("engine",), ("trainer",), ("engine", "trainer")])
def test_nan(sides_with_nan: tuple[str, ...]) -> None:
    sides = make_sides()
    if "engine" in sides_with_nan:
        sides.rollout.change_completions = lambda done: [replace(c, log_probs=poison(c.log_probs)) for c in done]
    if "trainer" in sides_with_nan:
        sides.trainer.change_scores = lambda scores: [poison(score) for score in scores]
    verdict = run(sides)
    assert verdict.exit_code == 1
    assert verdict.first == "weight version 0, prompt 0, sample 0, token 1"
    assert "of them NaN" in verdict.sentence
    assert f"so the NaN of the {sides_with_nan[0]} arises after them" in verdict.sentence
    assert "alone than in company" not in verdict.sentence
    assert sides.trainer.calls == 0


def test_equal_seeds_for_two_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vime_core.loop.prompts.sample_seed", lambda _run, _step, _prompt, sample: 40 + sample)
    verdict = run(make_sides())
    assert verdict.exit_code == 1
    assert verdict.first == "weight version 0, equal seeds, prompt 1, sample 0"


def test_a_training_forward_of_its_own() -> None:
    sides = make_sides()
    sides.trainer.training_error = 1
    verdict = run(sides)
    assert verdict.exit_code == 1
    assert "in the trainer's training forward, 1 ulp apart" in verdict.sentence


def test_updates_that_change_too_little() -> None:
    sides = make_sides()
    sides.trainer.step_size = 0.001
    verdict = run(sides)
    assert verdict.exit_code == 3
    assert verdict.changed is not None
    assert verdict.changed < 0.5
    assert "less than 50%" in verdict.sentence


def test_near_constant_logits() -> None:
    verdict = run(make_sides(scale=0.02))
    assert verdict.exit_code == 3
    assert "hardly vary" in verdict.sentence


def test_an_engine_that_refuses_to_go_on() -> None:
    sides = make_sides()

    def refuse(_weights: Any, _version: int) -> dict[str, str]:
        raise ContractViolation("the engine holds version 0", remedy="None.", code="VIME-ALIGN-061")

    sides.rollout.update_weights = refuse
    verdict = run(sides)
    assert verdict.exit_code == 1
    assert "the engine holds version 0 (VIME-ALIGN-061, after the comparison at weight version 0)" in verdict.sentence


def test_an_engine_that_finds_a_nan_of_its_own() -> None:
    sides = make_sides()

    def refuse(_requests: Any) -> list[Completion]:
        raise NotFinite("a log-prob of sample (0, 1) is not finite", remedy="None.", code="VIME-BACKEND-068")

    sides.rollout.generate = refuse
    verdict = run(sides)
    assert (verdict.exit_code, verdict.first) == (1, "VIME-BACKEND-068")
    assert "sample (0, 1)" in verdict.sentence


def test_what_was_compared_before_a_side_caught_itself_comes_first() -> None:
    sides = make_sides()
    sides.trainer.training_error = 1

    def refuse(_weights: Any, _version: int) -> dict[str, str]:
        raise ContractViolation("the engine holds version 0", remedy="None.", code="VIME-ALIGN-061")

    sides.rollout.update_weights = refuse
    assert "1 ulp apart" in run(sides).sentence


def test_an_engine_that_dies_is_no_verdict() -> None:
    sides = make_sides()

    def die(_requests: Any) -> list[Completion]:
        raise BackendError("the engine died", remedy="None.")

    sides.rollout.generate = die
    with pytest.raises(BackendError):
        run(sides)


def test_stock_sides_are_compared_too() -> None:
    sides = make_sides()
    sides.trainer.change_scores = lambda scores: [score + np.float32(0.01) for score in scores]
    verdict = run(without_insides(sides))
    assert verdict.exit_code == 1
    assert "no alignment contract is configured (alignment.contract), so none was promised" in verdict.sentence
    assert verdict.largest_difference == pytest.approx(0.01, rel=1e-3)
    assert run(without_insides(make_sides())).exit_code == 0


def test_layers_need_a_contract() -> None:
    with pytest.raises(ConfigError, match=r"alignment\.contract = ''"):
        run(without_insides(make_sides()), layers=True)


def test_a_contract_without_taps_is_a_fault_of_its_plugin() -> None:
    sides = make_sides()
    rollout: Any = PlainRollout(sides.rollout)
    with pytest.raises(PluginError, match=r"the rollout backend keeps alignment\.contract, but does not offer"):
        run(replace(sides, rollout=rollout), layers=True)


DRAWS: dict[str, Any] = {
    "the likeliest": lambda _request, row, _token: int(np.argmax(row)),
    "another seed": lambda request, row, _token: int(
        np.argmax(row + np.random.default_rng(request.seed + 1).gumbel(size=VOCABULARY))
    ),
    "another temperature": lambda request, row, _token: int(
        np.argmax(1.1 * row + np.random.default_rng(request.seed).gumbel(size=VOCABULARY))
    ),
}


@pytest.mark.parametrize("fault", DRAWS)
def test_a_token_that_its_seed_does_not_draw(fault: str) -> None:
    sides = make_sides()
    sides.rollout.change_draw = DRAWS[fault]
    verdict = run(sides)
    assert verdict.exit_code == 1, verdict.sentence
    assert "every log-prob is equal, but" in verdict.sentence
    assert "where the request's seed draws token" in verdict.sentence
    assert verdict.first.startswith("weight version 0, prompt ")


def test_an_engine_that_draws_in_its_own_way_is_not_compared_and_says_so() -> None:
    sides = make_sides()
    assert "every token is the one that its request's seed draws" in run(sides).sentence
    sides = make_sides()
    sides.rollout.own_draw = True
    verdict = run(sides)
    assert verdict.exit_code == 0
    assert "was not compared, since the engine does not say that it draws by the contract" in verdict.sentence
    assert verdict.details["draws"] == ["the engine does not say that it draws by the contract"] * 3


def test_a_token_lost_with_its_stop_token() -> None:
    sides = make_sides(settings={"stop_token_ids": [VOCABULARY - 1]})

    def lose(completions: list[Completion]) -> list[Completion]:
        return [replace(c, tokens=c.tokens[:-1], log_probs=c.log_probs[:-1], finish_reason="stop") for c in completions]

    sides.rollout.change_completions = lose
    verdict = run(sides)
    assert verdict.exit_code == 1
    assert "its last token is none" in verdict.sentence
