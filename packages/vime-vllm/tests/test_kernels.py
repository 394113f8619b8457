"""What vLLM's kernels promise the provider ``cuda``, as far as that can be seen without a GPU."""

from __future__ import annotations

from dataclasses import replace
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


def test_products_of_a_few_microseconds_do_not_pay() -> None:
    paying = {str(c): [m for m in (1, 64, 6144, 65536) if deep_gemm.pays(c, m)] for c in (FORWARD, HEAD, DX, DW)}
    assert paying == {str(c): [65536] for c in (FORWARD, DX, DW)} | {str(HEAD): [1, 64, 6144, 65536]}


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


@pytest.mark.parametrize("call", [FORWARD, HEAD, DX, DW], ids=str)
@pytest.mark.parametrize("count", [1, 64])
def test_operands_and_result_of_a_call_fit_together(call: LinearCall, count: int) -> None:
    left, right, y = (torch.empty(*size, dtype=dtype, device="meta") for *size, dtype in deep_gemm.stored(call, count))
    product = {
        "forward": lambda: left @ right.t(), "input gradient": lambda: left @ right,
        "weight gradient": lambda: left.t() @ right,
    }[call.of]()  # fmt: skip
    assert y.shape == product.shape
    assert y.dtype == (torch.float32 if call.wide else torch.bfloat16)
    assert deep_gemm.workspace_bytes([(call, count)]) == max(t.nbytes for t in (left, right, y))


class Library:
    """DeepGEMM's three products, by PyTorch, and how many rows each call had."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def bf16_gemm_nt(self, left: torch.Tensor, right: torch.Tensor, y: torch.Tensor, *, compiled_dims: str) -> None:
        assert compiled_dims == ""
        self.rows.append(len(left))
        y.copy_(left.float() @ right.float().t())

    def bf16_gemm_nn(self, left: torch.Tensor, right: torch.Tensor, y: torch.Tensor, *, compiled_dims: str) -> None:
        self.bf16_gemm_nt(left, right.t(), y, compiled_dims=compiled_dims)

    def bf16_gemm_tn(self, left: torch.Tensor, right: torch.Tensor, y: torch.Tensor, *, compiled_dims: str) -> None:
        self.bf16_gemm_nt(left.t(), right.t(), y, compiled_dims=compiled_dims)


@pytest.mark.parametrize("call", [FORWARD, DX, DW], ids=str)
@pytest.mark.parametrize(
    ("count", "parts"), [(1, [1]), (64, [64]), (128, [128]), (129, [128, 1]), (300, [128, 128, 44])]
)
def test_more_rows_than_one_call_takes_are_computed_in_parts(
    call: LinearCall, count: int, parts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deep_gemm, "_MOST_ROWS", 128)
    library = Library()
    monkeypatch.setattr(deep_gemm, "_library", lambda: library)
    call = replace(call, n=24, k=40)
    left, right = (
        torch.randn(rows, columns, generator=torch.Generator().manual_seed(count)).bfloat16()
        for rows, columns, _ in deep_gemm.stored(call, count)[:2]
    )
    whole = (left.t() if call.of == "weight gradient" else left).float() @ (
        right.t() if call.of == "forward" else right
    ).float()
    y = deep_gemm.run(call, left, right)
    assert y.dtype == (torch.float32 if call.wide else torch.bfloat16)
    torch.testing.assert_close(y.float(), whole, rtol=1e-2, atol=1e-2)
    assert library.rows == ([24] if call.of == "weight gradient" else parts)


def test_as_many_processes_compile_as_have_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    workspace = deep_gemm.workspace_bytes([(HEAD, 832), (DW, 8192)])
    assert workspace == 151936 * 896 * 2
    each = workspace + compiling.CONTEXT_BYTES
    assert compiling.processes(140 << 30, workspace) == compiling.MOST_PROCESSES
    for room, expected in ((0, 1), (each, 1), (2 * each - 1, 1), (2 * each, 2), (7 * each, 7)):
        assert compiling.processes(room, workspace) == expected


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("CUDA out of memory. Tried to allocate 168.00 MiB. GPU 0 has", compiling.OUT_OF_MEMORY),
        ("CUDA error: out of memory", compiling.OUT_OF_MEMORY),
        ("CUDA driver error: 2 (CUDA_ERROR_OUT_OF_MEMORY)", compiling.OUT_OF_MEMORY),
        ("an illegal memory access was encountered", 1),
    ],
)
def test_a_compiling_process_without_memory_ends_with_a_code_of_its_own(
    message: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deep_gemm, "offer", lambda: f"DeepGEMM cannot be imported: {message}")
    with pytest.raises(SystemExit) as caught:
        compiling.main()
    assert caught.value.code == code


def test_parts_that_found_no_memory_are_compiled_again_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    parts, ran = [[(FORWARD, count)] for count in (16, 32, 64)], list[list[int]]()

    def full(limit: int, given: list[list[compiling.Task]]) -> list[list[compiling.Task]]:
        ran.append([part[0][1] for part in given])
        return given[limit:]

    monkeypatch.setattr(compiling, "run_side_by_side", lambda given: full(1, given))
    compiling.compile_in(parts)
    assert ran == [[16, 32, 64], [32], [64]]
    monkeypatch.setattr(compiling, "run_side_by_side", lambda given: full(0, given))
    with pytest.raises(BackendError, match=r"ran out of GPU memory in a process that needs 1\.0 GiB") as caught:
        compiling.compile_in(parts)
    assert "gpu_memory_utilization" in caught.value.remedy


def test_a_process_without_memory_for_what_others_compiled_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_tasks: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setenv(deep_gemm.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(compiling, "missing", lambda *_: {})
    monkeypatch.setattr(deep_gemm, "run_all", full)
    with pytest.raises(BackendError, match=r"ran out of GPU memory in a process that needs 0\.3 GiB") as caught:
        compiling.compile_all([HEAD])
    assert caught.value.code == "VIME-ALIGN-015"


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
