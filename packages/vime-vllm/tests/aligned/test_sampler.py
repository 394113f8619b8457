"""The contract's sampler of model runner V1, called as the runner calls it."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from vime_core.numerics import load_provider, masked
from vime_core.numerics.draw import numbers
from vime_core.types import SampleRequest
from vime_vllm.sampling import sampling_params

if find_spec("vllm") is None:
    pytest.fail("vLLM is not installed, so its tests cannot run", pytrace=False)

VOCABULARY = 1003
OPERATIONS = load_provider("cpu")
PLACES = [0, 3, 7, 0, 500, 12, 1, 2]


@pytest.fixture(scope="module")
def sampler() -> Any:
    from vllm.v1.sample.sampler import Sampler

    from vime_vllm.aligned.sampler import AlignedSampler

    return AlignedSampler(Sampler("processed_logprobs"), OPERATIONS, lambda: np.array(PLACES))


def make_logits(rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return (torch.randn(rows, VOCABULARY, generator=generator) * 3).bfloat16().float()


def metadata(temperatures: list[float], seeds: list[int], **changes: Any) -> Any:
    greedy = [t == 0 for t in temperatures]
    settings = {
        "temperature": None if all(greedy) else torch.tensor(temperatures),
        "all_greedy": all(greedy),
        "all_random": not any(greedy),
        "top_k": None,
        "top_p": None,
        "generators": {i: torch.Generator().manual_seed(s) for i, s in enumerate(seeds) if not greedy[i]},
        "max_num_logprobs": 0,
        "logprob_token_ids": None,
        "allowed_token_ids_mask": None,
        "bad_words_token_ids": {},
        "no_penalties": True,
        "output_token_ids": [],
        "spec_token_ids": None,
        "logitsprocs": SimpleNamespace(non_argmax_invariant=[], argmax_invariant=[]),
        "thinking_budget_state_holder": None,
    }
    return SimpleNamespace(**{**settings, **changes})


def draw(sampler: Any, logits: Tensor, meta: Any, places: list[int] = PLACES) -> tuple[Tensor, Tensor]:
    sampler.places = lambda: np.array(places)
    output = sampler(logits.clone(), meta)
    tokens = output.sampled_token_ids[:, 0].long()
    assert torch.equal(output.logprobs_tensors.logprob_token_ids[:, 0].long(), tokens)
    return tokens, output.logprobs_tensors.logprobs[:, 0]


TEMPERATURES = [1.0, 0.0, 0.7, 1.3, 0.0, 0.35, 1.0, 2.5]
SEEDS = [2**62 + 11, 0, 12, 2**40 + 13, 0, 14, 2**63 - 1, 16]


def test_scores_are_the_contract_s_at_each_row_s_temperature(sampler: Any) -> None:
    logits = make_logits(8)
    tokens, scores = draw(sampler, logits, metadata(TEMPERATURES, SEEDS))
    expected = OPERATIONS.token_log_probs(logits, tokens, torch.tensor(TEMPERATURES))
    assert torch.equal(scores, expected)
    assert torch.equal(tokens[[1, 4]], logits[[1, 4]].argmax(-1))
    assert not torch.equal(tokens, logits.argmax(-1))
    torch_scores = (logits / torch.tensor([t or 1.0 for t in TEMPERATURES])[:, None]).log_softmax(-1)
    assert torch.allclose(scores, torch_scores.gather(1, tokens[:, None])[:, 0], atol=1e-4)


def test_a_token_is_a_function_of_logits_seed_and_place(sampler: Any) -> None:
    logits, everyone_s = make_logits(1).expand(8, VOCABULARY), [1.0] * 8
    u = torch.stack([numbers(seed, 501, torch.device("cpu"))[place] for seed, place in zip(SEEDS, PLACES, strict=True)])
    expected = OPERATIONS.draw(logits, u)
    assert torch.equal(draw(sampler, logits, metadata(everyone_s, SEEDS))[0], expected)
    assert not torch.equal(draw(sampler, logits, metadata(everyone_s, SEEDS), [p + 1 for p in PLACES])[0], expected)
    same = draw(sampler, logits, metadata(everyone_s, [2**63 - 1] * 8), [4] * 8)[0]
    assert torch.equal(same, same[:1].expand(8))


def test_a_row_s_result_is_its_own(sampler: Any) -> None:
    logits = make_logits(8)
    tokens, scores = draw(sampler, logits, metadata(TEMPERATURES, SEEDS))
    for i in range(8):
        meta = metadata(TEMPERATURES[i : i + 1], SEEDS[i : i + 1])
        token, score = draw(sampler, logits[i : i + 1], meta, PLACES[i : i + 1])
        assert (token, score) == (tokens[i], scores[i])
    flipped = draw(sampler, logits.flip(0), metadata(TEMPERATURES[::-1], SEEDS[::-1]), PLACES[::-1])
    assert torch.equal(flipped[0], tokens.flip(0))
    assert torch.equal(flipped[1], scores.flip(0))


def test_the_logits_are_left_as_they_are(sampler: Any) -> None:
    logits = make_logits(8)
    kept = logits.clone()
    sampler(logits, metadata(TEMPERATURES, SEEDS, top_k=torch.full((8,), 5, dtype=torch.int32)))
    assert torch.equal(logits, kept)


def test_greedy_takes_the_lowest_id_of_equals(sampler: Any) -> None:
    logits = make_logits(3)
    for token in (900, 40, 77):
        logits[:, token] = 50.0
    tokens, scores = draw(sampler, logits, metadata([0.0] * 3, [0] * 3))
    assert tokens.tolist() == [40, 40, 40]
    assert torch.equal(scores, OPERATIONS.token_log_probs(logits, tokens))
    tokens, _ = draw(sampler, logits, metadata([0.0, 0.0, 1.0], [0, 0, 3]))
    assert tokens[:2].tolist() == [40, 40]


def test_tokens_come_from_what_top_k_and_top_p_left_and_are_scored_among_it(sampler: Any) -> None:
    logits, temperatures = make_logits(8), [0.8] * 8
    top_k = torch.tensor([3, VOCABULARY, 3, 3, 1, 8, 2, 5], dtype=torch.int32)
    top_p = torch.tensor([1.0, 0.3, 0.5, 0.9, 1.0, 1.0, 0.2, 0.7])
    keep = OPERATIONS.keep_mask(logits, 0.8, top_k, top_p)
    for seed in range(20):
        meta = metadata(temperatures, [seed * 8 + i for i in range(8)], top_k=top_k, top_p=top_p)
        tokens, scores = draw(sampler, logits, meta)
        assert keep.gather(1, tokens[:, None]).all()
        assert torch.equal(scores, OPERATIONS.token_log_probs(masked(logits, keep), tokens, 0.8))
    only_k = draw(sampler, logits, metadata(temperatures, list(range(8)), top_k=top_k))[0]
    assert OPERATIONS.keep_mask(logits, 0.8, top_k).gather(1, only_k[:, None]).all()


def test_what_was_left_is_reported(sampler: Any) -> None:
    logits = make_logits(8)
    top_k = torch.tensor([3, VOCABULARY, 3, 3, 1, 8, 2, VOCABULARY], dtype=torch.int32)
    top_p = torch.tensor([1.0, 0.3, 0.5, 0.9, 1.0, 1.0, 0.2, 1.0])
    keep = OPERATIONS.keep_mask(logits, 0.8, top_k, top_p)
    meta = metadata([0.8] * 8, [*range(8)], top_k=top_k, top_p=top_p, max_num_logprobs=VOCABULARY)
    reported = sampler(logits, meta).logprobs_tensors
    left = [set(row) for row in reported.logprob_token_ids[:, 1:].tolist()]
    assert left[:7] == [set(row.nonzero()[:, 0].tolist()) for row in keep[:7]]
    assert left[7] == {-1}
    assert reported.logprobs.shape == reported.logprob_token_ids.shape
    alone = sampler(logits, metadata([0.8] * 8, [*range(8)], max_num_logprobs=VOCABULARY)).logprobs_tensors
    assert alone.logprob_token_ids[:, 1:].tolist() == [[-1]] * 8


def test_prompts_are_scored_by_the_contract(sampler: Any) -> None:
    logits = make_logits(300)
    expected = OPERATIONS.log_softmax(logits)
    assert torch.equal(sampler.compute_logprobs(logits), expected)
    assert not torch.equal(logits.log_softmax(-1), expected), "the two must differ somewhere, or this proves nothing"


def test_no_scores_where_none_are_wanted_and_none_but_the_sampled_token_s(sampler: Any) -> None:
    logits = make_logits(2)
    assert sampler(logits, metadata([1.0, 0.0], [1, 0], max_num_logprobs=None)).logprobs_tensors is None
    for changes in ({"max_num_logprobs": 3}, {"max_num_logprobs": -1}, {"logprob_token_ids": {0: [1]}}):
        with pytest.raises(ValueError, match="and no other"):
            sampler(logits, metadata([1.0, 0.0], [1, 0], **changes))


def test_a_sampler_that_is_not_stock_is_not_replaced(sampler: Any) -> None:
    from vime_core.errors import PolicyError
    from vime_vllm.aligned.worker import replace_sampler

    worker = SimpleNamespace(model_runner=SimpleNamespace(sampler=sampler))
    with pytest.raises(PolicyError, match="AlignedSampler"):
        replace_sampler(worker)


@pytest.mark.parametrize(
    "changes",
    [{"min_p": 0.1}, {"min_tokens": 2}, {"repetition_penalty": 1.1}, {"logit_bias": {3: 1.0}}, {"logprobs": 4}],
)
def test_on_v2_a_request_may_set_nothing_that_no_contract_defines(changes: dict[str, Any]) -> None:
    from vllm import SamplingParams

    from vime_vllm.aligned.sampler_v2 import require_defined

    for kept in (False, True):
        request = SampleRequest(0, 0, (1,), seed=2**63 - 1, max_tokens=4, temperature=0.5, top_k=3, stop_token_ids=(7,))
        require_defined(sampling_params(request, kept=kept))
    require_defined(SamplingParams(temperature=0.0, logprobs=0, prompt_logprobs=0))
    require_defined(SamplingParams.for_sampler_warmup())
    with pytest.raises(ValueError, match=f"no request may set {next(iter(changes))} = "):
        require_defined(SamplingParams(**changes))
