"""Row bits and speed of bf16 linears, y (M, N) = x (M, K) @ w (N, K).T, per provider, over M.

    python linear_rows.py [--warm N] [--bits] [--timing] [--grads]

A provider is row-invariant at (N, K) when row i has the same bits for every M. The table also says whether providers
agree with each other: all of them add ascending 16-element steps of the tensor core, if nothing splits K.
DeepGEMM compiles a kernel per shape and tile: `--warm N` does that first, in N processes.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context

import torch

from cublaslt import CublasLt
from measure import attempt, geometric_mean, graph_us, table, unequal_rows
from triton_ops import matmul

ROWS = (1, 2, 3, 16, 17, 63, 64, 65, 128, 255, 256, 257, 1024, 4096)
TIMED_ROWS = (1, 16, 64, 256, 4096)
SHAPES = {
    "0.5B qkv": (1152, 896), "0.5B o": (896, 896), "0.5B gate-up": (9728, 896), "0.5B down": (896, 4864),
    "4B qkv": (6144, 2560), "4B o": (2560, 4096), "4B gate-up": (19456, 2560), "4B down": (2560, 9728),
    "7B qkv": (4608, 3584), "7B o": (3584, 3584), "7B gate-up": (37888, 3584), "7B down": (3584, 18944),
    "0.5B head": (151936, 896),
}  # fmt: skip
GRAD_SHAPES = ("0.5B gate-up", "0.5B down", "7B qkv", "7B down")
OWN = "own Triton, one chain"
L2_BYTES = 128 * 2**20
Linear = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Task = tuple[str, int, int, int]


def chunks_for(n: int, k: int) -> int:
    """Fixed parts of K, from (N, K) only: enough programs at small M for narrow N and deep K."""
    columns = -(-n // 64)
    return max(1, min(8, 132 // columns, k // 1024))


def deep_gemm_nt(x: torch.Tensor, w: torch.Tensor, out_dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    from vllm.third_party import deep_gemm

    y = torch.empty(x.shape[0], w.shape[0], dtype=out_dtype, device=x.device)
    deep_gemm.bf16_gemm_nt(x, w, y)
    return y


def torch_linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(x, w)


def torch_without_split(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """PyTorch's own way: cuBLASLt with reduced precision and split K both refused."""
    torch.backends.cuda.preferred_blas_library("cublaslt")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)
    try:
        return torch.nn.functional.linear(x, w)
    finally:
        torch.backends.cuda.preferred_blas_library("default")
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (True, True)


def providers() -> dict[str, Linear]:
    lt, family = CublasLt(), CublasLt(only=66)

    def lt_linear(library: CublasLt, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return library.linear(x, w, torch.empty(x.shape[0], w.shape[0], dtype=x.dtype, device=x.device))

    return {
        "cuBLAS (torch default)": torch_linear,
        "cuBLASLt via torch, no split": torch_without_split,
        "cuBLASLt no reduction": partial(lt_linear, lt),
        "cuBLASLt no reduction, family 66": partial(lt_linear, family),
        "DeepGEMM": deep_gemm_nt,
        OWN: matmul,
        "own Triton, chunks": lambda x, w: matmul(x, w, chunks=chunks_for(*w.shape)),
    }


def weight(n: int, k: int, copies: int = 1) -> torch.Tensor:
    torch.manual_seed(n + k)
    return (torch.randn(copies, n, k, device="cuda") * 0.05).bfloat16()


def inputs(m: int, k: int) -> torch.Tensor:
    torch.manual_seed(k)
    return torch.randn(4096, k, device="cuda").bfloat16()[:m].contiguous()


def rows_for(n: int) -> tuple[int, ...]:
    return tuple(m for m in ROWS if n < 100_000 or m in (1, 3, 64, 65, 256, 1024))


def bits() -> None:
    lt = CublasLt()
    rows: list[list[object]] = []
    for title, (n, k) in SHAPES.items():
        w, x = weight(n, k)[0], inputs(4096, k)
        exact = (x[:64].double() @ w.double().T).float()
        chain = attempt("chain", lambda w=w, x=x: matmul(x[:1024], w))
        for name, linear in providers().items():
            cells = attempt(f"{title} {name}", partial(bits_of, linear, w, x, rows_for(n), exact, chain))
            rows.append([title, f"{n} x {k}", name, *(cells or ["not run"] * 4)])
        algos = {m: lt.describe(lt.algorithm(m, n, k)) for m in (1, 64, 4096)}
        print(f"cuBLASLt choice without reduction, {title}: {algos}", flush=True)
        attempt("spread", partial(check_spread, title, w, x))
    head = [
        "layer",
        "N x K",
        "provider",
        "M with other bits (rows)",
        "rows unequal to the one chain",
        "sizes",
        "error",
    ]
    table("row bits over M", head, rows)


def bits_of(linear: Linear, w, x, sizes, exact, chain):  # type: ignore[no-untyped-def]
    """A size is compared on its first 64 rows with M = 64, and beyond them with the largest M."""
    outs = {m: linear(x[:m].contiguous(), w) for m in sizes}
    base, largest = outs[64], outs[max(sizes)]
    wrong = {}
    for m, y in outs.items():
        count = unequal_rows(y[:64], base[: min(m, 64)])[0] + unequal_rows(y, largest[:m])[0]
        if count:
            wrong[m] = count
    moved = unequal_rows(linear(x[:257].flip(0).contiguous(), w).flip(0), outs[257])[0] if 257 in outs else 0
    if moved:
        wrong["reversed"] = moved
    other = "-" if chain is None else f"{unequal_rows(outs[1024], chain)[0]}/1024"
    error = float((base.float() - exact).norm() / exact.norm())
    return [str(wrong) if wrong else "none", other, len(sizes), error]


def check_spread(title: str, w: torch.Tensor, x: torch.Tensor) -> None:
    """Chunks computed side by side and chunks walked by one program: the same bits?"""
    chunks = chunks_for(*w.shape)
    if chunks == 1:
        return
    for m in (3, 64, 257):
        a, b = (matmul(x[:m].contiguous(), w, chunks=chunks, spread=spread) for spread in (True, False))
        print(f"chunks {title} C={chunks} M={m}: spread != walked in {unequal_rows(a, b)[0]} rows", flush=True)


def timing() -> None:
    rows: list[list[object]] = []
    ratios: dict[tuple[str, int], list[float]] = {}
    for title, (n, k) in SHAPES.items():
        copies = max(2, min(16, L2_BYTES // (2 * n * k) + 1))
        w = weight(n, k, copies)
        for m in TIMED_ROWS:
            if n > 100_000 and m > 256:
                continue
            x = inputs(m, k)
            base, cells = 0.0, []
            for name, linear in providers().items():
                us = attempt(f"{title} M={m} {name}", partial(time_of, linear, x, w))
                base = base or us or 0.0
                cells.append(base / us if us else "-")
                if us:
                    ratios.setdefault((name, m), []).append(base / us)
            rows.append([title, f"{n} x {k}", m, base, *cells[1:]])
    names = list(providers())
    table("speed relative to default cuBLAS (above 1: faster)", ["layer", "N x K", "M", "cuBLAS us", *names[1:]], rows)
    means = [[m, *(geometric_mean(ratios.get((name, m), [])) for name in names[1:])] for m in TIMED_ROWS]
    table("geometric means over the layers", ["M", *names[1:]], means)


def time_of(linear: Linear, x: torch.Tensor, w: torch.Tensor) -> float:
    return graph_us([partial(linear, x, one) for one in w], replays=9)


def grads() -> None:
    """dgrad: dx = dy @ w, contraction over N. wgrad: dw = dy.T @ x in fp32, contraction over M = 4096 tokens."""
    rows: list[list[object]] = []
    for title in GRAD_SHAPES:
        n, k = SHAPES[title]
        w, x, dy = weight(n, k)[0], inputs(4096, k), inputs(4096, n)
        for kind, calls, other, cells_of in (("dgrad", dgrads(), w, dgrad_cells), ("wgrad", wgrads(), x, wgrad_cells)):
            chain = calls[OWN](dy, other)
            for name, call in calls.items():
                cells = attempt(f"{kind} {title} {name}", partial(cells_of, call, dy, other, chain))
                rows.append([kind, title, name, *(cells or ["not run"] * 5)])
    head = ["pass", "layer", "provider", "bits", "rows unequal to own", "error", "us at M=4096", "speed / default"]
    table("backward", head, relative(rows))


def relative(rows: list[list[object]]) -> list[list[object]]:
    base: dict[tuple[object, object], float] = {}
    for row in rows:
        us = row[6]
        first = base.setdefault((row[0], row[1]), us) if isinstance(us, float) else None
        row[7] = first / us if first and isinstance(us, float) else "-"
    return rows


def deep_gemm_nn(dy: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    from vllm.third_party import deep_gemm

    dx = torch.empty(dy.shape[0], w.shape[1], dtype=torch.bfloat16, device=dy.device)
    deep_gemm.bf16_gemm_nn(dy, w, dx)
    return dx


def deep_gemm_tn(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    from vllm.third_party import deep_gemm

    dw = torch.empty(dy.shape[1], x.shape[1], dtype=torch.float32, device=dy.device)
    deep_gemm.bf16_gemm_tn(dy, x, dw)
    return dw


def dgrads() -> dict[str, Linear]:
    return {
        "cuBLAS (torch default)": torch.mm,
        "DeepGEMM nn": deep_gemm_nn,
        OWN: lambda dy, w: matmul(dy, w, w_t=True),
    }


def wgrads() -> dict[str, Linear]:
    return {
        "cuBLAS (torch default, fp32 out)": lambda dy, x: torch.mm(dy.T, x, out_dtype=torch.float32),
        "cuBLAS (torch default, bf16 out)": lambda dy, x: torch.mm(dy.T, x),
        "DeepGEMM tn, fp32 out": deep_gemm_tn,
        OWN: lambda dy, x: matmul(dy, x, x_t=True, w_t=True, out_dtype=torch.float32),
    }


def dgrad_cells(call: Linear, dy: torch.Tensor, w: torch.Tensor, chain: torch.Tensor) -> list[object]:
    outs = {m: call(dy[:m].contiguous(), w) for m in (1, 64, 257, 4096)}
    wrong = {m: unequal_rows(y, outs[4096][:m])[0] for m, y in outs.items()}
    exact = (dy[:64].double() @ w.double()).float()
    error = float((outs[64].float() - exact).norm() / exact.norm())
    moved = {m: count for m, count in wrong.items() if count}
    bits = f"rows differ {moved}" if moved else "row-invariant"
    return [bits, unequal_rows(outs[4096], chain)[0], error, graph_us([partial(call, dy, w)] * 4), 0.0]


def wgrad_cells(call: Linear, dy: torch.Tensor, x: torch.Tensor, chain: torch.Tensor) -> list[object]:
    first = call(dy, x)
    changed = sum(unequal_rows(first, call(dy, x))[0] for _ in range(10))
    exact = (dy[:, :64].double().T @ x.double()).float()
    error = float((first[:64].float() - exact).norm() / exact.norm())
    bits = f"{changed} rows changed" if changed else "10 repeats equal"
    other = unequal_rows(first, chain)[0] if first.dtype == chain.dtype else "-"
    return [bits, other, error, graph_us([partial(call, dy, x)] * 4), 0.0]


def warm_one(task: Task) -> None:
    kind, n, k, m = task
    w = torch.zeros(n, k, dtype=torch.bfloat16, device="cuda")
    x = torch.zeros(m, n if kind in ("nn", "tn") else k, dtype=torch.bfloat16, device="cuda")
    if kind == "nn":
        deep_gemm_nn(x, w)
    elif kind == "tn":
        deep_gemm_tn(x, torch.zeros(m, k, dtype=torch.bfloat16, device="cuda"))
    else:
        deep_gemm_nt(x, w, torch.float32 if kind == "fp32" else torch.bfloat16)


def warm_group(tasks: list[Task]) -> None:
    for task in tasks:
        attempt(f"warm {task}", partial(warm_one, task))


def warm(groups: list[list[Task]], processes: int) -> None:
    """Compile DeepGEMM's kernels (nvcc) for groups of (kind, N, K, M), several groups at a time."""
    with get_context("spawn").Pool(processes) as pool:
        pool.map(warm_group, groups, chunksize=1)
    print(f"compiled with {processes} processes on {os.cpu_count()} cores", flush=True)


def groups_here() -> list[list[Task]]:
    groups = [[("nt", n, k, m) for m in rows_for(n)] for n, k in SHAPES.values()]
    halves = [group[i::2] for group in groups for i in (0, 1)]
    for title in GRAD_SHAPES:
        n, k = SHAPES[title]
        halves.append([("nn", n, k, m) for m in (1, 64, 257, 4096)])
        halves.append([("tn", n, k, 4096)])
    return halves


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--warm", type=int, default=0)
    for name in ("bits", "timing", "grads"):
        parser.add_argument(f"--{name}", action="store_true")
    args = parser.parse_args()
    if args.warm:
        warm(groups_here(), args.warm)
    for name, run in {"bits": bits, "timing": timing, "grads": grads}.items():
        if getattr(args, name):
            run()


if __name__ == "__main__":
    main()
