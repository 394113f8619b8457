"""Comparing raw bits, timing through CUDA graphs, and printing tables: shared by the probes beside this file."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

T = TypeVar("T")
_BITS = {2: torch.int16, 4: torch.int32}


def unequal(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Mask of elements whose bits differ; a NaN on either side counts as unequal. Same shape and dtype, not empty."""
    if left.shape != right.shape or left.dtype != right.dtype or left.numel() == 0:
        raise ValueError(f"nothing comparable: {tuple(left.shape)} {left.dtype} and {tuple(right.shape)} {right.dtype}")
    bits = _BITS[left.element_size()]
    return (left.contiguous().view(bits) != right.contiguous().view(bits)) | left.isnan() | right.isnan()


def unequal_rows(left: torch.Tensor, right: torch.Tensor) -> tuple[int, float]:
    """How many rows (first dimension) hold an unequal element, and the largest absolute difference."""
    mask = unequal(left, right).flatten(1).any(1)
    return int(mask.sum()), float((left.float() - right.float()).abs().max())


def captured(calls: Sequence[Callable[[], T]]) -> tuple[torch.cuda.CUDAGraph, list[T]]:
    """One CUDA graph that holds all `calls` in order, and what each returned: filled by a replay."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [call() for call in calls]
    return graph, found


def replayed(call: Callable[[], T]) -> T:
    """What `call` gives in a CUDA graph: kernels may be chosen otherwise outside of one."""
    graph, (found,) = captured([call])
    graph.replay()
    torch.cuda.synchronize()
    return found


def graph_us(calls: Sequence[Callable[[], object]], replays: int = 15) -> float:
    """Median microseconds per call of one CUDA graph that holds all `calls` in order.

    Give several calls over distinct buffers, so that the working set exceeds the L2 cache.
    """
    graph, _ = captured(calls)
    times = [_replay_ms(graph) for _ in range(replays + 3)][3:]
    return statistics.median(times) * 1e3 / len(calls)


def _replay_ms(graph: torch.cuda.CUDAGraph) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def geometric_mean(values: Sequence[float]) -> float:
    return statistics.geometric_mean(values) if values else float("nan")


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a Markdown table."""
    print(f"\n### {title}\n\n| {' | '.join(head)} |\n|{'---|' * len(head)}", flush=True)
    for row in rows:
        print(f"| {' | '.join(_cell(value) for value in row)} |", flush=True)


def _cell(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def attempt(name: str, call: Callable[[], object]) -> object | None:
    """Run one check; a failure is printed with its reason and never stops the others."""
    try:
        return call()
    except Exception as error:
        print(f"NOT RUN {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        return None
