"""Faults planted in a live engine that show only beside others, after a cache hit, in chunks or as a prefill."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from fakes import CONTEXT, VOCABULARY, make_sides, without_insides
from torch import Tensor

from vime_core.errors import ContractViolation
from vime_core.types import Float32Array, SampleRequest
from vime_core.verify.batch_live import BatchOptions, chunkings, verify_batch
from vime_core.verify.verdict import Verdict


def run(sides: Any, company: int = 8) -> Verdict:
    return verify_batch(sides, BatchOptions(company))


def circumstances(verdict: Verdict) -> dict[str, Any]:
    return verdict.details["circumstances"]


def test_an_engine_that_looks_at_nobody_else_holds() -> None:
    sides = make_sides()
    verdict = run(sides)
    assert verdict.exit_code == 0, verdict.sentence
    counts = {name: found["trials"] for name, found in circumstances(verdict).items()}
    assert counts["alone again"] == counts["in company"] == counts["in another order"] == 12
    assert counts["after a prefix-cache hit"] == 18  # three samplings of three prompts over a page, twice
    assert counts["in chunks"] == 6
    assert counts["re-scored as prefill"] == 8  # temperature 0.8 has no prefill
    assert verdict.coverage.longest == CONTEXT - 1
    lengths = {len(r.prompt_tokens) for call in sides.rollout.calls for r in call}
    assert {1, 2, 3, 15, 16, 17, 25} <= lengths
    assert max(lengths) == CONTEXT - 7
    assert verdict.details["not_tried"] == {}
    assert not sides.rollout.keeps_cache
    assert sides.rollout.chunk == 0


def test_an_engine_that_is_wrong_late_in_company() -> None:
    sides = make_sides()

    def late(requests: Sequence[SampleRequest], one: SampleRequest, row: Tensor) -> Tensor:
        return nudge(row) if len(requests) > 1 and len(one.prompt_tokens) > 48 else row

    sides.rollout.change_row = late
    verdict = run(sides)
    assert verdict.exit_code == 1
    assert verdict.first.startswith("in company, prompt 3, sample 0")


def test_an_engine_of_one_request_at_a_time_knows_no_company() -> None:
    verdict = run(make_sides(settings={"max_num_seqs": 1}))
    assert verdict.exit_code == 0, verdict.sentence
    assert "in company never happens here: max_num_seqs = 1" in verdict.sentence
    assert "alone again, in another order" in verdict.sentence
    assert "never happens" not in run(make_sides(settings={"max_num_seqs": 2})).sentence


def test_a_long_prompt_is_not_cut_into_hundreds_of_chunks() -> None:
    made = [SampleRequest(0, 0, (0,) * length, 0, 1) for length in (1, 17, 73, 5000)]
    cut = {tokens: [len(r.prompt_tokens) for r in chosen] for tokens, chosen in chunkings(made)}
    assert cut == {5: [17, 73], 16: [17, 73], 156: [5000]}


def nudge(row: Tensor, size: float = 1e-2) -> Tensor:
    return row + size * torch.arange(VOCABULARY)


def test_the_smallest_company_is_found() -> None:
    """A prompt of 16 and one of 3 tokens together, and nothing less, change what the others get."""
    sides = make_sides()

    def crowded(requests: Sequence[SampleRequest], one: SampleRequest, row: Tensor) -> Tensor:
        lengths = {len(r.prompt_tokens) for r in requests if r.prompt_index >= 1000}
        return nudge(row) if {3, 15} <= lengths and one.prompt_index < 1000 else row

    sides.rollout.change_row = crowded
    verdict = run(sides)
    assert verdict.exit_code == 1
    assert verdict.first.startswith("in company, prompt 0, sample 0, token ")
    assert sorted(verdict.details["smallest_company"]) == [3, 15]
    assert "the smallest company that breaks it is 2 other prompts" in verdict.sentence


def test_a_place_in_the_batch() -> None:
    sides = make_sides()
    sides.rollout.change_row = lambda every, one, row: nudge(row) if every.index(one) >= 12 else row
    verdict = run(sides)
    assert verdict.exit_code == 1
    assert verdict.first.startswith("in another order")
    assert circumstances(verdict)["in company"]["unequal"] == 0


def test_an_engine_that_does_not_repeat_itself() -> None:
    sides = make_sides()
    sides.rollout.change_row = lambda _all, _one, row: nudge(row, len(sides.rollout.calls) * 1e-2)
    verdict = run(sides)
    assert verdict.exit_code == 1
    assert verdict.first.startswith("alone again, prompt 0, sample 0")
    assert verdict.details["smallest_company"] is None


def test_a_cached_prefix_of_other_bits() -> None:
    sides = make_sides()
    hit = {"count": 0}
    original = sides.rollout._complete

    def complete(requests: Sequence[SampleRequest], request: SampleRequest) -> Any:
        if sides.rollout._prefix(request) in sides.rollout.cached and sides.rollout.keeps_cache:
            hit["count"] += 1
            sides.rollout.change_row = lambda _all, _one, row: nudge(row)
        else:
            sides.rollout.change_row = lambda _all, _one, row: row
        return original(requests, request)

    sides.rollout._complete = complete
    verdict = run(sides)
    assert hit["count"]
    assert verdict.exit_code == 1
    assert verdict.first.startswith("after a prefix-cache hit, prompt 1")


def test_chunks_of_other_bits() -> None:
    sides = make_sides()
    sides.rollout.chunk_error = 1e-2
    verdict = run(sides)
    assert verdict.exit_code == 1
    assert verdict.first.startswith("in chunks, prompt ")


def test_a_prefill_of_other_bits() -> None:
    sides = make_sides()
    original = sides.rollout.prompt_log_probs

    def scored(tokens: Sequence[int]) -> Float32Array:
        return np.nextafter(original(tokens), np.float32(0))

    sides.rollout.prompt_log_probs = scored
    verdict = run(sides)
    assert verdict.exit_code == 1
    assert verdict.first.startswith("re-scored as prefill, prompt 0")
    assert "1 ulp apart" in verdict.sentence


def test_a_cache_that_is_never_hit_is_no_evidence() -> None:
    sides = make_sides()
    sides.rollout.cached_tokens = lambda: [0] * len(sides.rollout.calls[-1])
    verdict = run(sides)
    assert verdict.exit_code == 3
    assert "no request of the verdict found its prefix in the cache" in verdict.sentence


def test_an_engine_without_insides_is_tried_as_far_as_it_goes() -> None:
    verdict = run(without_insides(make_sides()))
    assert verdict.exit_code == 3
    assert "what was tried is equal" in verdict.sentence
    lacking = ["after a prefix-cache hit", "in chunks", "re-scored as prefill"]
    assert all(f"{name} (this engine offers no switch" in verdict.sentence for name in lacking)


def test_settings_rule_circumstances_out() -> None:
    sides = make_sides(settings={"prefix_caching": False, "chunked_prefill": False})
    assert "after a prefix-cache hit never happens here: prefix_caching = False" in run(sides).sentence
    assert "in chunks never happens here: chunked_prefill = False" not in run(sides).sentence
    plain = run(without_insides(make_sides(settings={"prefix_caching": False, "chunked_prefill": False})))
    assert "this was not tried: re-scored as prefill" in plain.sentence


def test_an_engine_that_refuses_chunks() -> None:
    sides = make_sides()
    sides.rollout.can_chunk = False
    verdict = run(sides)
    assert verdict.exit_code == 0
    assert "in chunks never happens here: this engine takes no chunks" in verdict.sentence


def test_near_constant_logits() -> None:
    assert run(make_sides(scale=0.02)).exit_code == 3


@pytest.mark.parametrize("code", ["VIME-ALIGN-061", "VIME-ALIGN-062"])
def test_an_engine_that_catches_itself(code: str) -> None:
    sides = make_sides()

    def refuse(_requests: Any) -> list[Any]:
        raise ContractViolation("a stale prefix was used", remedy="None.", code=code)

    sides.rollout.generate = refuse
    verdict = run(sides)
    assert (verdict.exit_code, verdict.first) == (1, code)
