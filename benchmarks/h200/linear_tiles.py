"""Which tile makes the one-chain linear fast, and does any tile change a bit?

    python linear_tiles.py [--small] [--large] [--linear own,auto]
    python linear_tiles.py [--provider] [--linear own,auto] [--warm "0.5B"]

Every candidate is compared with the provider's own kernel on every M, then timed beside cuBLAS
(torch's default). Small: M of decode, where the weight's bytes are the bound; large: M of prefill and training.

``--provider`` times no candidate, only what a run has under each ``alignment.linear`` named, side by side: their bits
are compared, and "fastest" is what a choice among them for each shape would reach. Where none reaches 0.95 the kernels
that cuBLAS and the last of them launch are named. ``--warm`` alone times nothing.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product as cross
from multiprocessing import get_context

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor
from vime_core.alignment.offers import choose_offered, open_offers
from vime_core.config.schema import AlignmentSection
from vime_core.numerics import load_provider
from vime_core.numerics.cuda.matmul import linear, product
from vime_core.numerics.kernels import Kernels
from vime_core.numerics.offers import LinearCall, Pass
from vime_core.plugins.manager import PluginManager

from linear_rows import L2_BYTES, SHAPES
from measure import attempt, captured, graph_us, replayed, table, unequal
from timings import BASE, FASTEST, Timing, means, rows

SMALL_ROWS, LARGE_ROWS = (1, 16, 64, 256), (256, 1024, 4096)
PROVIDER_ROWS = (1, 16, 64, 256, 1024, 4096)
COMPARED_ROWS = (1, 16, 64, 256, 4096)  # of the mean over all
MISSED = 0.95  # of cuBLAS's speed
HEAD_ROWS, HEAD = 256, 100_000  # no more rows for a vocabulary this wide
Run = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@triton.jit
def described(
    x_desc, w_desc, y_desc, rows, columns, depth,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One tile by TMA; tiles of GROUP row blocks side by side share their columns in the cache."""
    tiles_m, tiles_n = tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N)
    program = tl.program_id(0)
    first = program // (GROUP * tiles_n) * GROUP
    high = tl.minimum(tiles_m - first, GROUP)
    m, n = first + program % (GROUP * tiles_n) % high, program % (GROUP * tiles_n) // high
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, depth, BLOCK_K):
        x = x_desc.load([m * BLOCK_M, start])
        w = w_desc.load([n * BLOCK_N, start])
        total = tl.dot(x, w.T, total)
    y_desc.store([m * BLOCK_M, n * BLOCK_N], total.to(y_desc.dtype))


@triton.jit
def persistent(
    x_desc, w_desc, y_desc, rows, columns, depth,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
    SPECIAL: tl.constexpr,
):  # fmt: skip
    """The same, each program walking over tiles."""
    tiles_m, tiles_n = tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=True, warp_specialize=SPECIAL):
        first = tile // (GROUP * tiles_n) * GROUP
        high = tl.minimum(tiles_m - first, GROUP)
        m, n = first + tile % (GROUP * tiles_n) % high, tile % (GROUP * tiles_n) // high
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, depth, BLOCK_K):
            x = x_desc.load([m * BLOCK_M, start])
            w = w_desc.load([n * BLOCK_N, start])
            total = tl.dot(x, w.T, total)
        y_desc.store([m * BLOCK_M, n * BLOCK_N], total.to(y_desc.dtype))


def by_pointer(m: int, n: int, k: int, warps: int, stages: int, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = torch.empty(len(x), len(w), dtype=x.dtype, device=x.device)
    product[(triton.cdiv(len(x), m), triton.cdiv(len(w), n))](
        x, w, None, y, *y.shape, x.shape[1], x.stride(0), w.stride(0), HAS_BIAS=False, EXACT=False, BLOCK_M=m,
        BLOCK_N=n, BLOCK_K=k, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return y


def by_descriptor(
    m: int, n: int, k: int, warps: int, stages: int, kind: str, x: torch.Tensor, w: torch.Tensor
) -> torch.Tensor:
    y = torch.empty(len(x), len(w), dtype=x.dtype, device=x.device)
    descriptors = (
        TensorDescriptor.from_tensor(x, [m, k]),
        TensorDescriptor.from_tensor(w, [n, k]),
        TensorDescriptor.from_tensor(y, [m, n]),
    )
    tiles = triton.cdiv(len(x), m) * triton.cdiv(len(w), n)
    fixed = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP": 8, "num_warps": warps, "num_stages": stages}
    if kind == "tma":
        described[(tiles,)](*descriptors, *y.shape, x.shape[1], **fixed)
    else:
        programs = min(tiles, 132)
        persistent[(programs,)](
            *descriptors, *y.shape, x.shape[1], **fixed, PROGRAMS=programs, SPECIAL=kind == "special"
        )
    return y


def candidates(large: bool) -> dict[str, Run]:
    found: dict[str, Run] = {}
    if large:
        for tile in ((128, 128, 64, 8, 4), (128, 256, 64, 8, 3), (64, 256, 64, 4, 4), (128, 128, 128, 8, 3)):
            for kind in ("tma", "persistent"):
                found[f"{kind} {tile}"] = partial(by_descriptor, *tile, kind)
        found["special (128, 256, 64, 8, 3)"] = partial(by_descriptor, 128, 256, 64, 8, 3, "special")
        found["special (128, 128, 64, 4, 4)"] = partial(by_descriptor, 128, 128, 64, 4, 4, "special")
        return found
    for n, (k, stages) in cross((16, 32, 64), ((64, 8), (128, 5), (256, 3))):
        if (64 + n) * k * 2 * stages < 220_000:
            found[f"pointer {(64, n, k, 4, stages)}"] = partial(by_pointer, 64, n, k, 4, stages)
    for n in (16, 32, 64):
        found[f"tma {(64, n, 128, 4, 5)}"] = partial(by_descriptor, 64, n, 128, 4, 5, "tma")
    return found


def agrees(large: bool, name: str) -> str:
    """Whether a candidate gives the provider's bits on a few shapes, tails of M and N included; why not, or empty."""
    try:
        run = candidates(large)[name]
        for m, n, k in ((300, 1152, 896), (1, 896, 4864), (65, 328, 512), (1025 if large else 64, 4608, 3584)):
            torch.manual_seed(m + n + k)
            x, w = torch.randn(m, k, device="cuda").bfloat16(), (torch.randn(n, k, device="cuda") * 0.05).bfloat16()
            if not torch.equal(run(x, w).view(torch.int16), linear(x, w, None, 1, False).view(torch.int16)):
                return f"other bits at M, N, K = {m}, {n}, {k}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return ""


def provider_kernels(linear: str) -> Kernels:
    """Those of provider ``cuda`` as a run has them under ``alignment.linear = linear``."""
    section = AlignmentSection(provider="cuda", linear=linear, attention="own")
    return load_provider("cuda", open_offers(choose_offered(section, PluginManager.discover()))).kernels


def provider_linear(linear: str) -> Run:
    """Its linear, compared with the provider's own kernel and compiled."""
    kernels = provider_kernels(linear)
    settle(linear, kernels, [LinearCall("forward", n, k, wide=False) for n, k in SHAPES.values()])
    return lambda x, w: kernels.linear(x, w, None, 1, False)


def settle(title: str, kernels: Kernels, calls: Sequence[LinearCall]) -> None:
    began = time.perf_counter()
    kernels.settle(calls, torch.device("cuda"))
    found = Counter(kernels.choices().values())
    print(f"{title}: compiled and compared in {time.perf_counter() - began:.1f} s: {dict(found)}", flush=True)


def warm(linear: str, words: str) -> None:
    """Compile and compare all three products of the layers whose names hold ``words``, for runs that come after."""
    shapes = [shape for layer, shape in SHAPES.items() if words in layer]
    passes: tuple[Pass, ...] = ("forward", "input gradient", "weight gradient")
    calls = [LinearCall(of, n, k, wide=False) for of in passes for n, k in shapes]
    settle(f"{linear}, all products of {words}", provider_kernels(linear), calls)


def timed_providers(names: Sequence[str]) -> None:
    """Each ``alignment.linear`` beside cuBLAS, all in one run."""
    runs = {name: provider_linear(name) for name in names}
    found = time_all(runs, PROVIDER_ROWS)
    report(found, names, PROVIDER_ROWS)
    compared = [t for t in found if t.m in COMPARED_ROWS]
    table(
        f"geometric means over M = {COMPARED_ROWS}",
        ["", "all"],
        [[r[0], r[-1]] for r in means(compared, names, COMPARED_ROWS)],
    )
    differing = sum(any(t.unequal.values()) for t in found)
    print(f"{len(found)} products compared, {differing} with other bits", flush=True)
    misses = [t for t in found if (t.ratio(FASTEST, names) or MISSED) < MISSED]
    named = {BASE: torch.nn.functional.linear, names[-1]: runs[names[-1]]}
    table("kernels where all miss", ["layer", "M", *named], [[t.layer, t.m, *kernel_names(t, named)] for t in misses])


def kernel_names(missed: Timing, runs: dict[str, Run]) -> list[str]:
    """What each way launches for a layer and M in a graph, which is what was timed."""
    from torch.profiler import ProfilerActivity, profile

    n, k = SHAPES[missed.layer]
    x, w = (torch.randn(rows, k, device="cuda").bfloat16() for rows in (missed.m, n))
    found: list[str] = []
    for run in runs.values():
        graph, _ = captured([partial(run, x, w)])
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            graph.replay()
            torch.cuda.synchronize()
        launched = [event.key for event in seen.key_averages() if str(event.device_type).endswith("CUDA")]
        found.append("; ".join(key[:150] for key in launched).replace("|", "/") or "none seen")
    return found


def timed_candidates(large: bool, linear: str) -> None:
    runs = {linear: provider_linear(linear)}
    with get_context("spawn").Pool(min(len(candidates(large)), os.cpu_count() or 1)) as pool:  # compiles side by side
        faults = pool.map(partial(agrees, large), candidates(large), chunksize=1)
    for (name, run), fault in zip(candidates(large).items(), faults, strict=True):
        if fault:
            print(f"{name}: {fault}", flush=True)
        else:
            runs[name] = run
    sizes = LARGE_ROWS if large else SMALL_ROWS
    report(time_all(runs, sizes), list(runs), sizes)


def time_all(runs: dict[str, Run], sizes: Sequence[int]) -> list[Timing]:
    """Every layer with every M, over copies of its weight that together exceed the cache."""
    found: list[Timing] = []
    for layer, (n, k) in SHAPES.items():
        copies = max(1, min(8, L2_BYTES // (2 * n * k)))
        w = (torch.randn(copies, n, k, device="cuda") * 0.05).bfloat16()
        for m in [m for m in sizes if n < HEAD or m <= HEAD_ROWS]:
            found.append(timing(layer, runs, torch.randn(m, k, device="cuda").bfloat16(), w))
            print(layer, m, {name: round(us, 1) for name, us in found[-1].us.items()}, flush=True)
    return found


def timing(layer: str, runs: dict[str, Run], x: torch.Tensor, w: torch.Tensor) -> Timing:
    all_runs = {BASE: torch.nn.functional.linear, **runs}
    us = {n: attempt(n, partial(graph_us, [partial(run, x, one) for one in w], 5)) for n, run in all_runs.items()}
    us = {name: value for name, value in us.items() if isinstance(value, float)}
    first, *others = [(name, replayed(partial(run, x, w[0]))) for name, run in runs.items() if name in us] or [("", x)]
    return Timing(layer, len(x), us, {name: int(unequal(first[1], y).sum()) for name, y in others})


def report(found: Sequence[Timing], names: Sequence[str], sizes: Sequence[int]) -> None:
    head = ["layer", "M", "cuBLAS us", *names, "fastest", "its", "unequal"]
    table("cuBLAS's time over", head, rows(found, names))
    table("geometric means", ["", *(f"M = {m}" for m in sizes), "all"], means(found, names, sizes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--provider", action="store_true", help="time no candidate, only what the provider chooses")
    parser.add_argument("--linear", default="own,auto", help="alignment.linear: own, auto, deepgemm; several by commas")
    parser.add_argument("--warm", metavar="WORDS", help="first compile all products of layers with these words")
    chosen = parser.parse_args()
    names = chosen.linear.split(",")
    with torch.no_grad():
        if chosen.warm:
            warm(names[-1], chosen.warm)
        if chosen.provider:
            timed_providers(names)
        both = not (chosen.small or chosen.large or chosen.provider or chosen.warm)
        if chosen.small or both:
            timed_candidates(large=False, linear=names[0])
        if chosen.large or both:
            timed_candidates(large=True, linear=names[0])


if __name__ == "__main__":
    main()
