"""The provider ``cpu`` beside torch's own operations: microseconds at the shapes of a 135M Llama structure.

    python benchmarks/numerics.py [--threads N] [--dtype bfloat16|float32]

The two of a row are timed in turn, and the best of several rounds counts, so that a busy machine disturbs both alike.
Weights are taken in turn from more memory than the caches hold, as in a model. torch may change its order of
summation with M; the provider may not.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from itertools import cycle

import torch
from torch import Tensor
from torch.nn import functional

from vime_core.numerics import AttentionSpec, KvCache, PagedBatch, load_provider, rope_table

HIDDEN, FFN, VOCABULARY, HEADS, KV_HEADS, HEAD_DIM = 576, 1536, 49152, 9, 3, 64
ROWS = (1, 16, 64, 256)
WEIGHT_BYTES = 120_000_000
Run = Callable[[], object]


def best_us(runs: list[Run], rounds: int = 9, seconds: float = 0.01) -> list[float]:
    """The best time of each, the rounds interleaved."""
    best = [float("inf")] * len(runs)
    for run in runs:
        run()
    for _ in range(rounds):
        for i, run in enumerate(runs):
            start, count = time.perf_counter(), 0
            while time.perf_counter() - start < seconds:
                run()
                count += 1
            best[i] = min(best[i], (time.perf_counter() - start) / count * 1e6)
    return best


def row(name: str, m: int, ours: Run, torchs: Run) -> None:
    a, b = best_us([ours, torchs])
    print(f"{name:<28} {m:>5} {a:>11.1f} {b:>11.1f} {b / a:>8.2f}", flush=True)


def weights(n: int, k: int, dtype: torch.dtype) -> Iterator[Tensor]:
    one = n * k * torch.empty((), dtype=dtype).element_size()
    return cycle([torch.randn(n, k).to(dtype) * 0.05 for _ in range(max(1, WEIGHT_BYTES // one))])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    dtype: torch.dtype = getattr(torch, arguments.dtype)
    ops = load_provider("cpu")
    print(
        f"{ops.details['instruction set']}, {arguments.dtype}, {arguments.threads} thread(s), torch {torch.__version__}"
    )
    print(f"{'operation':<28} {'M':>5} {'cpu, us':>11} {'torch, us':>11} {'speed-up':>8}")
    with torch.inference_mode():
        linears(dtype)
        small(dtype)
        attentions(dtype)


def linears(dtype: torch.dtype) -> None:
    ops = load_provider("cpu")
    shapes = {"o": (HIDDEN, HIDDEN), "gate-up": (2 * FFN, HIDDEN), "down": (HIDDEN, FFN), "head": (VOCABULARY, HIDDEN)}
    for name, (n, k) in shapes.items():
        given = weights(n, k, dtype)
        for m in ROWS:
            x = torch.randn(m, k).to(dtype)
            row(
                f"linear {name} {n}x{k}",
                m,
                lambda x=x, given=given: ops.linear(x, next(given)),
                lambda x=x, given=given: functional.linear(x, next(given)),
            )


def small(dtype: torch.dtype) -> None:
    ops, norm, table = load_provider("cpu"), torch.ones(HIDDEN, dtype=dtype), rope_table(2048, HEAD_DIM, 1e4)
    cos, sin = (torch.cat([t, t], -1).to(dtype) for t in table.chunk(2, -1))
    for m in ROWS:
        x, gate_up = torch.randn(m, HIDDEN).to(dtype), torch.randn(m, 2 * FFN).to(dtype)
        q, at = torch.randn(m, HEADS, HEAD_DIM).to(dtype), torch.arange(m)
        logits, ids = torch.randn(m, VOCABULARY).to(dtype), torch.arange(m)

        def torch_rope(q: Tensor = q, at: Tensor = at) -> Tensor:
            turned = torch.cat([-q[..., HEAD_DIM // 2 :], q[..., : HEAD_DIM // 2]], -1)
            return q * cos[at, None] + turned * sin[at, None]

        def torch_log_probs(logits: Tensor = logits, ids: Tensor = ids) -> Tensor:
            return logits.float().log_softmax(-1).gather(-1, ids[:, None])

        row(
            "add_rms_norm",
            m,
            lambda x=x: ops.add_rms_norm(x, x, norm, 1e-5),
            lambda x=x: functional.rms_norm(x + x, (HIDDEN,), norm, 1e-5),
        )
        row("swiglu", m, lambda g=gate_up: ops.swiglu(g), lambda g=gate_up: functional.silu(g[:, :FFN]) * g[:, FFN:])
        row("rope", m, lambda q=q, at=at: ops.rope(q, at, table), torch_rope)
        row("token_log_probs", m, lambda z=logits, i=ids: ops.token_log_probs(z, i), torch_log_probs)


def attentions(dtype: torch.dtype) -> None:
    """M queries: one prompt of M tokens, and M requests that decode at 256 tokens of context."""
    ops, spec, page, context = load_provider("cpu"), AttentionSpec(HEAD_DIM**-0.5), 16, 256
    for m in ROWS:
        q, k, v = (torch.randn(m, heads, HEAD_DIM).to(dtype) for heads in (HEADS, KV_HEADS, KV_HEADS))
        cu, dense = torch.tensor([0, m]), [t.transpose(0, 1)[None].contiguous() for t in (q, k, v)]
        row(
            "attention, prefill of M",
            m,
            lambda q=q, k=k, v=v, cu=cu: ops.attention_packed(q, k, v, cu, spec),
            lambda d=dense: functional.scaled_dot_product_attention(*d, is_causal=True, enable_gqa=True),
        )
    for m in ROWS:
        pages = m * context // page
        cache = KvCache(*(torch.randn(pages, KV_HEADS, page, HEAD_DIM).to(dtype) for _ in range(2)))
        table = torch.randperm(pages).view(m, -1).int()
        batch = PagedBatch(torch.arange(m + 1).int(), torch.full((m,), context).int(), table)
        q = torch.randn(m, HEADS, HEAD_DIM).to(dtype)
        dense = [q[:, :, None], *(torch.randn(m, KV_HEADS, context, HEAD_DIM).to(dtype) for _ in range(2))]
        row(
            f"attention, decode at {context}",
            m,
            lambda q=q, c=cache, b=batch: ops.attention_paged(q, c, b, spec),
            lambda d=dense: functional.scaled_dot_product_attention(*d, enable_gqa=True),
        )


if __name__ == "__main__":
    main()
