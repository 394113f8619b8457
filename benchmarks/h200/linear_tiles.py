"""Which tile makes the one-chain linear fast, and does any tile change a bit?

    python linear_tiles.py [--small] [--large] [--provider] [--linear auto]

Every candidate is compared with the provider's own kernel on every M, then timed beside cuBLAS
(torch's default). Small: M of decode, where the weight's bytes are the bound; large: M of prefill and training.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
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
from vime_core.numerics.offers import LinearCall
from vime_core.plugins.manager import PluginManager

from linear_rows import L2_BYTES, SHAPES
from measure import attempt, geometric_mean, graph_us, table

SMALL_ROWS, LARGE_ROWS = (1, 16, 64, 256), (256, 1024, 4096)
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


def provider_linear(kernels: str) -> Run:
    """The linear of provider ``cuda`` as a run has it under ``alignment.linear = kernels``, compared and compiled."""
    section = AlignmentSection(provider="cuda", linear=kernels, attention="own")
    found = load_provider("cuda", open_offers(choose_offered(section, PluginManager.discover()))).kernels
    began = time.perf_counter()
    found.settle([LinearCall("forward", n, k, wide=False) for n, k in SHAPES.values()], torch.device("cuda"))
    print(f"compiled and compared in {time.perf_counter() - began:.1f} s: {dict(found.choices())}", flush=True)
    return lambda x, w: found.linear(x, w, None, 1, False)


def timed(large: bool, provider_only: bool, provider: Run) -> None:
    runs: dict[str, Run] = {"cuBLAS": torch.nn.functional.linear, "provider": provider}
    all_runs = {} if provider_only else candidates(large)
    with get_context("spawn").Pool(min(len(all_runs) or 1, os.cpu_count() or 1)) as pool:  # compiles side by side
        faults = pool.map(partial(agrees, large), all_runs, chunksize=1)
    for (name, run), fault in zip(all_runs.items(), faults, strict=True):
        if fault:
            print(f"{name}: {fault}", flush=True)
        else:
            runs[name] = run
    sizes = LARGE_ROWS if large else SMALL_ROWS
    rows: list[list[object]] = []
    ratios: dict[tuple[str, int], list[float]] = {}
    for title, (n, k) in SHAPES.items():
        if n > 100_000 and large:
            continue
        copies = max(1, min(8, L2_BYTES // (2 * n * k)))
        w = (torch.randn(copies, n, k, device="cuda") * 0.05).bfloat16()
        for m in sizes:
            us = times(runs, torch.randn(m, k, device="cuda").bfloat16(), w)
            for name, value in us.items():
                ratios.setdefault((name, m), []).append(us["cuBLAS"] / value)
            rows.append([title, m, us["cuBLAS"], *compared(us)])
            print(title, m, {name: round(value, 1) for name, value in us.items()}, flush=True)
    table("cuBLAS's time over", ["layer", "M", "cuBLAS us", "provider", "best tile", "which"], rows)
    means = [[name, *(geometric_mean(ratios.get((name, m), [])) for m in sizes)] for name in runs]
    table("geometric means", ["", *(f"M = {m}" for m in sizes)], means)


def times(runs: dict[str, Run], x: torch.Tensor, w: torch.Tensor) -> dict[str, float]:
    found = {n: attempt(n, partial(graph_us, [partial(run, x, one) for one in w], 5)) for n, run in runs.items()}
    return {name: us for name, us in found.items() if isinstance(us, float)}


def compared(us: dict[str, float]) -> list[object]:
    base = us["cuBLAS"]
    best = min((name for name in us if name != "cuBLAS"), key=us.__getitem__)
    return [base / us["provider"], base / us[best], best]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--provider", action="store_true", help="time no candidate, only what the provider chooses")
    parser.add_argument("--linear", default="auto", help="alignment.linear of the provider: auto, own or deepgemm")
    chosen = parser.parse_args()
    with torch.no_grad():
        provider = provider_linear(chosen.linear)
        if chosen.small or not chosen.large:
            timed(large=False, provider_only=chosen.provider, provider=provider)
        if chosen.large or not chosen.small:
            timed(large=True, provider_only=chosen.provider, provider=provider)
