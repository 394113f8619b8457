"""Where an engine's decode steps spend their time. Its functions run in the worker (``benchmarks/gpu.py --profile``).

Host and GPU are looked at in two rollouts, since a profiler of kernels makes every launch slower.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

NAME_WIDTH = 90
PARTS = ("execute_model", "sample_tokens")
_seen: dict[str, Any] = {}


def begin(worker: Any, requests: int, kernels: bool) -> None:
    """Watch decode steps of so many requests: their times, or with ``kernels`` what the GPU does in them."""
    runner = worker.model_runner
    usual = {name: getattr(runner, name) for name in PARTS}
    _seen.update(runner=runner, starts=[], times={name: [] for name in PARTS}, decodes=False)

    def watched(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            if name == PARTS[0]:
                _seen["decodes"] = _is_decode(args[0] if args else kwargs["scheduler_output"], requests)
                _seen["starts"].append(start if _seen["decodes"] else None)
            found = usual[name](*args, **kwargs)
            if _seen["decodes"]:
                _seen["times"][name].append(time.perf_counter() - start)
            return found

        return call

    for name in PARTS:
        setattr(runner, name, watched(name))
    if kernels:
        _seen["profiler"] = _profiler()


def end(worker: Any, rows: int) -> str:
    """What was seen since `begin`, as text."""
    del worker
    for name in PARTS:
        delattr(_seen["runner"], name)
    steps = len(_seen["times"][PARTS[0]])
    if profiler := _seen.pop("profiler", None):
        profiler.__exit__(None, None, None)
        return _kernels(profiler, steps, len(_seen["starts"]), rows)
    starts = _seen["starts"]
    gaps = [later - start for start, later in itertools.pairwise(starts) if start and later]
    parts = [f"{name} {_median_ms(_seen['times'][name])}" for name in PARTS]
    return f"{steps} decode steps, from one to the next {_median_ms(gaps)}, of it {', '.join(parts)}"


def _is_decode(scheduled: Any, requests: int) -> bool:
    return scheduled.total_num_scheduled_tokens == len(scheduled.num_scheduled_tokens) == requests


def _median_ms(seconds: list[float]) -> str:
    return f"{1e3 * statistics.median(seconds):.3f} ms" if seconds else "not seen"


def _profiler() -> Any:
    from torch.profiler import ProfilerActivity, profile

    return profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]).__enter__()


def kernels_of(profiler: Any) -> list[Any]:
    """What ran on the GPU, by name, the longest first."""
    found = [event for event in profiler.key_averages() if str(event.device_type).endswith("CUDA")]
    return sorted(found, key=lambda event: -event.self_device_time_total)


def _kernels(profiler: Any, decodes: int, steps: int, rows: int) -> str:
    found = kernels_of(profiler)
    busy = sum(event.self_device_time_total for event in found)
    lines = [
        f"{steps} steps, {decodes} of them decodes; the GPU is busy for {busy / 1e3 / max(1, steps):.3f} ms a step"
    ]
    for event in found[:rows]:
        each = event.self_device_time_total / max(1, steps)
        lines.append(f"  {each:>9.1f} us {event.count / max(1, steps):>6.1f} x {event.key[:NAME_WIDTH]}")
    return "\n".join(lines)
