"""The C++ functions refuse what would make them read or write where nothing is, from the first such value on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from numerics_support import cpu, normal
from torch import Tensor

from vime_core.numerics import AttentionSpec, KvCache, PagedBatch, rope_table
from vime_core.numerics.kernels import Kernels

Call = Callable[[Kernels], Any]
SPEC = AttentionSpec(0.2)
LOGITS, ONES = normal(0, 2, 4), torch.ones(2)
HEADS, CACHE = normal(1, 5, 2, 8), KvCache(normal(2, 3, 2, 4, 8), normal(3, 3, 2, 4, 8))
BATCH = PagedBatch(torch.tensor([0, 5]), torch.tensor([8]), torch.tensor([[2, 0]]))
X, WEIGHT = normal(4, 3, 8), normal(5, 6, 8)


def score(*ids: int) -> Call:
    return lambda kernels: kernels.token_log_probs(LOGITS, torch.tensor(ids), ONES)


def turn(*positions: int) -> Call:
    table = rope_table(7, 8, 1e4)
    return lambda kernels: kernels.rope(HEADS, torch.tensor(positions), table, False, False)


def write(*slots: int) -> Call:
    return lambda kernels: kernels.write_kv(HEADS, HEADS, CACHE, torch.tensor(slots))


def attend(*, out: Tensor | None = None, **changes: list[Any]) -> Call:
    batch = replace(BATCH, **{name: torch.tensor(value) for name, value in changes.items()})
    o = torch.zeros_like(HEADS) if out is None else out
    return lambda kernels: kernels.attention_paged(HEADS, CACHE, batch, SPEC, o)


def pack(*cu: int) -> Call:
    return lambda kernels: kernels.attention_packed(HEADS, HEADS, HEADS, torch.tensor(cu), SPEC)


def multiply(columns: int = 8, bias: int = 6, chunks: int = 1) -> Call:
    return lambda kernels: kernels.linear(X[:, :columns], WEIGHT, torch.ones(bias), chunks, False)


ALLOWED: list[Call] = [score(0, 3), turn(0, 6, 1, 2, 3), write(11, -1, 0), attend(), pack(0, 5), multiply(chunks=2)]
REFUSED: dict[str, tuple[Call, str]] = {
    "an id as large as the vocabulary": (score(0, 4), "token id 4 outside"),
    "a negative id": (score(-1, 0), "token id -1 outside"),
    "a position at the table's end": (turn(0, 7, 1, 2, 3), "position 7 outside"),
    "a negative position": (turn(0, 1, 2, 3, -1), "position -1 outside"),
    "a slot at the cache's end": (write(12, 0), "slot 12 outside"),
    "more slots than keys": (write(*range(6)), "do not fit"),
    "a page at the cache's end": (attend(block_table=[[0, 3]]), "page outside"),
    "a negative page": (attend(block_table=[[-1, 0]]), "page outside"),
    "a request shorter than its queries": (attend(seq_lens=[4]), "shorter than its queries"),
    "a request longer than its pages": (attend(seq_lens=[9]), "longer than its block table"),
    "queries of no request": (attend(query_start=[0, 6]), "disagree"),
    "a result of fewer rows": (attend(out=torch.zeros(4, 2, 8)), "not like the queries"),
    "a result of another dtype": (attend(out=torch.zeros(5, 2, 8).bfloat16()), "not like the queries"),
    "a result by columns": (attend(out=torch.zeros(5, 8, 2).mT), "not like the queries"),
    "sequences that begin late": (pack(1, 5), "does not cover"),
    "sequences that end early": (pack(0, 4), "does not cover"),
    "sequences that go back": (pack(0, 4, 2, 5), "does not cover"),
    "a weight of more columns": (multiply(columns=7), "weight does not fit"),
    "a bias of one element more": (multiply(bias=7), "bias does not fit"),
    "a bias of one element less": (multiply(bias=5), "bias does not fit"),
    "chunks that do not divide": (multiply(chunks=3), "whole number of chunks"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_one_past_the_end_is_refused(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(RuntimeError, match=message):
        call(cpu().kernels)


@pytest.mark.parametrize("number", range(len(ALLOWED)))
def test_the_last_that_there_is_is_taken(number: int) -> None:
    ALLOWED[number](cpu().kernels)
