"""What vLLM's kernels promise the provider ``cuda``, as far as that can be seen without a GPU."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest
import torch

from vime_core.errors import BackendError
from vime_core.numerics import AttentionSpec
from vime_core.numerics.offers import LinearCall
from vime_core.plugins import KernelEntry
from vime_core.plugins.manager import PluginManager
from vime_vllm.kernels import compiling, deep_gemm, fa3

FORWARD = LinearCall("forward", 1536, 576, wide=False)
HEAD = LinearCall("forward", 151936, 896, wide=False)
DX = LinearCall("input gradient", 1536, 576, wide=False)
DW = LinearCall("weight gradient", 1536, 576, wide=True)
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


def test_both_are_offered_to_the_provider_cuda() -> None:
    entries = PluginManager.discover().of_kind(KernelEntry)
    assert {(e.provider, e.operation, e.name) for e in entries} >= {
        ("cuda", "linear", "deepgemm"),
        ("cuda", "attention", "fa3"),
    }


@without_gpu
def test_without_a_gpu_each_says_why_it_cannot_run() -> None:
    assert "capability 9.0" in str(deep_gemm.offer())
    assert "capability 9.0" in str(fa3.offer())


def test_every_block_of_rows_up_to_the_most_of_one_call_is_named() -> None:
    for call in (FORWARD, DX, HEAD):
        named, most = set(deep_gemm.tokens(call)), deep_gemm.most_rows(call)
        assert max(named) == most
        blocks = {16 if m <= 16 else 32 if m <= 32 else -(-m // 64) * 64 for m in range(1, most + 1)}
        assert named == blocks
    assert deep_gemm.most_rows(HEAD) * 151936 <= 1 << 27


def test_what_is_covered() -> None:
    assert all(map(deep_gemm.covers, (FORWARD, HEAD, DX, DW)))
    assert not deep_gemm.covers(LinearCall("forward", 1537, 576, wide=False))
    assert not deep_gemm.covers(LinearCall("forward", 1536, 577, wide=False))
    assert fa3.covers(64, torch.bfloat16, AttentionSpec(0.1))
    assert not fa3.covers(96, torch.bfloat16, AttentionSpec(0.1))
    assert not fa3.covers(64, torch.float32, AttentionSpec(0.1))
    assert not fa3.covers(64, torch.bfloat16, AttentionSpec(0.1, window=4))
    assert not fa3.covers(64, torch.bfloat16, AttentionSpec(0.1, soft_cap=4.0))


@pytest.mark.parametrize("parts", [1, 5, 12, 200])
def test_every_task_goes_to_one_process(parts: int) -> None:
    tasks = [(call, count) for call in (FORWARD, DX, DW) for count in deep_gemm.tokens(call)]
    split = compiling.split(tasks, parts)
    assert len(split) <= parts
    assert sorted(chain(*split), key=tasks.index) == tasks


@without_gpu
def test_a_compiling_process_that_fails_is_quoted() -> None:
    with pytest.raises(BackendError, match=r"DeepGEMM's kernels ended with 1: .*capability 9.0"):
        compiling.run_side_by_side([[(FORWARD, 1)]])


def test_a_call_is_compiled_once_whatever_else_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_key", lambda tasks: f"{len(tasks)} {tasks[0][0]}")  # the true one names the GPU
    tasks = {call: [(call, count) for count in deep_gemm.tokens(call)] for call in (FORWARD, DX, DW)}
    first = {call: tasks[call] for call in (FORWARD, DW)}
    new = compiling.missing(first, tmp_path)
    assert list(new.values()) == [FORWARD, DW]
    for done in new:
        done.touch()
    assert list(compiling.missing(tasks, tmp_path).values()) == [DX]
    fewer = {FORWARD: tasks[FORWARD][:1]}
    assert list(compiling.missing(fewer, tmp_path).values()) == [FORWARD]
    assert compiling.missing({FORWARD: []}, tmp_path) == {}
