"""Do prefill, chunks, prefix hits and decode give the same attention bits, per kernel, head size and page size?

    python attention_phases.py [--bits] [--timing] [--layout HEAD,HEADS,KV ...] [--length N] [--only WORDS]

Every row of every phase is compared with one whole-sequence prefill of the same kernel (paged, alone, page 64).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch

from fa3 import QUERY_BOUND_FLOOR, Fa3, Paged
from measure import attempt, graph_us, table, unequal_rows
from triton_ops import attention

LAYOUTS = ("64,14,2", "128,32,8")  # head size, query heads, KV heads: Qwen2.5-0.5B, Qwen3-4B
PAGES = (16, 64, 128)
CHUNKS = (1, 7, 64, 128, 300)
COMPANY = (517, 64, 129, 33, 260)
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Paged], torch.Tensor]


@dataclass(frozen=True)
class Layout:
    head: int
    q_heads: int
    kv_heads: int

    def __str__(self) -> str:
        return f"head size {self.head}, {self.q_heads} heads on {self.kv_heads}"


@dataclass(frozen=True)
class Sequences:
    """Queries, keys and values of several whole sequences, packed, and the same keys in shuffled pages."""

    lengths: list[int]
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    tables: torch.Tensor

    def start(self, index: int) -> int:
        return sum(self.lengths[:index])

    def queries(self, parts: list[tuple[int, int, int]]) -> tuple[torch.Tensor, Paged]:
        """A batch of (sequence, first query, end): queries [first, end) see keys [0, end)."""
        q = torch.cat([self.q[self.start(i) + first : self.start(i) + end] for i, first, end in parts])
        return q, batch_of(
            [end - first for _, first, end in parts],
            [end for _, _, end in parts],
            self.tables[[i for i, _, _ in parts]].contiguous(),
        )


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def batch_of(queries: list[int], keys: list[int], tables: torch.Tensor) -> Paged:
    starts = [sum(queries[:i]) for i in range(len(queries) + 1)]
    return Paged(ints(starts), ints(keys), tables, max(queries), max(keys))


def make_sequences(layout: Layout, page: int, lengths: list[int], seed: int = 0) -> Sequences:
    """Random sequences; the seed alone decides the numbers, so every page size holds the same keys."""
    torch.manual_seed(seed)
    head, q_heads, kv_heads = layout.head, layout.q_heads, layout.kv_heads
    total = sum(lengths)
    q, k, v = (torch.randn(total, h, head, device="cuda").bfloat16() * 1.5 for h in (q_heads, kv_heads, kv_heads))
    counts = [-(-n // page) for n in lengths]
    order = torch.randperm(sum(counts), device="cuda").int()
    tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32, device="cuda")
    k_pages, v_pages = (torch.full((sum(counts), page, kv_heads, head), 7.0, device="cuda").bfloat16() for _ in "kv")
    for i, count in enumerate(counts):
        pages = order[sum(counts[:i]) : sum(counts[: i + 1])]
        tables[i, :count] = pages
        first = sum(lengths[:i])
        for whole, paged in ((k, k_pages), (v, v_pages)):
            padded = torch.full((count * page, kv_heads, head), 7.0, device="cuda").bfloat16()
            padded[: lengths[i]] = whole[first : first + lengths[i]]
            paged[pages.long()] = padded.view(count, page, kv_heads, head)
    return Sequences(lengths, q, k, v, k_pages, v_pages, tables)


def triton_unified(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Paged) -> torch.Tensor:
    """vLLM's Triton kernel on its two-dimensional path (no splits over keys)."""
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    out = torch.empty_like(q)
    unified_attention(
        q=q, k=k, v=v, out=out, cu_seqlens_q=batch.query_starts, max_seqlen_q=batch.max_query,
        seqused_k=batch.seq_lens, max_seqlen_k=batch.max_keys, softmax_scale=q.shape[-1] ** -0.5, causal=True,
        window_size=(-1, -1), block_table=batch.block_table, softcap=0.0, q_descale=None, k_descale=None,
        v_descale=None,
    )  # fmt: skip
    return out


def own(**tiles: int) -> Attend:
    return lambda q, k, v, batch: attention(q, k, v, torch.empty_like(q), batch, **tiles)


def own_small_decode(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Paged) -> torch.Tensor:
    """The counter-example: a 16-row tile (another tensor-core instruction, keys spread over warps) for decode."""
    tiles = {"block_m": 16, "num_warps": 4} if batch.max_query == 1 else {}
    return attention(q, k, v, torch.empty_like(q), batch, **tiles)


def kernels() -> dict[str, Attend]:
    floor = QUERY_BOUND_FLOOR
    return {
        "FA3 num_splits=1": Fa3().paged,
        f"FA3 num_splits=1, query bound >= {floor}": Fa3(floor=floor).paged,
        f"FA3 bound >= {floor}, schedule made ahead": Fa3(floor=floor).scheduled,
        "FA3 num_splits=1, query bound >= 2": Fa3(floor=2).paged,
        f"FA3 bound >= {floor}, pack_gqa on": Fa3(floor=floor, pack_gqa=True).paged,
        f"FA3 bound >= {floor}, pack_gqa off": Fa3(floor=floor, pack_gqa=False).paged,
        "FA3 num_splits=1, query bound 2 always": Fa3(floor=2, ceiling=2).paged,
        "FA3 num_splits=0 (stock)": Fa3(num_splits=0).paged,
        "vLLM Triton unified (2D)": triton_unified,
        "own Triton 64/128 rows": own(),
        "own Triton, 16-row decode": own_small_decode,
    }


def phase_parts(length: int) -> dict[str, list[list[tuple[int, int, int]]]]:
    """Phase name to its batches; sequence 0 is the one compared, the others are company."""
    company = [(i + 1, 0, n) for i, n in enumerate(COMPANY)]
    decodes = [(i + 1, n - 1, n) for i, n in enumerate(COMPANY)]
    positions = [*range(0, length, 16), 127, 128, 129, 191, 192, 255, 256, 511, 512, 767, 768, length - 1]
    bounds = [*(sum(CHUNKS[:i]) for i in range(len(CHUNKS) + 1)), length]
    return {
        "prefill alone": [[(0, 0, length)]],
        "prefill in company": [[(0, 0, length), *company]],
        "chunks": [[(0, a, b)] for a, b in pairwise(bounds)],
        "chunks among decodes": [[(0, a, b), *decodes] for a, b in pairwise(bounds)],
        "prefix hit": [[(0, length - 200, length)], [(0, length - 8, length), *company]],
        "decode alone": [[(0, p, p + 1)] for p in positions[:: length // 250]],
        "decode, all positions, 64 a batch": [
            [(0, p, p + 1) for p in range(first, min(first + 64, length))] for first in range(0, length, 64)
        ],
        "decode beside a prefill": [[(0, p, p + 1), *company] for p in positions[:: length // 250]],
    }


def rows_of_first(parts: list[tuple[int, int, int]]) -> tuple[list[int], list[int]]:
    """Rows of the batch that belong to sequence 0, and the positions of their queries."""
    offset, rows, positions = 0, [], []
    for i, first, end in parts:
        if i == 0:
            rows += range(offset, offset + end - first)
            positions += range(first, end)
        offset += end - first
    return rows, positions


def unequal_in_phase(
    attend: Attend, data: Sequences, batches: list[list[tuple[int, int, int]]], want: torch.Tensor
) -> tuple[int, int, float]:
    total, wrong, worst = 0, 0, 0.0
    for parts in batches:
        q, batch = data.queries(parts)
        rows, positions = rows_of_first(parts)
        got = attend(q, data.k_pages, data.v_pages, batch)
        count, size = unequal_rows(got[rows], want[positions])
        total, wrong, worst = total + len(rows), wrong + count, max(worst, size)
    return total, wrong, worst


def reference(data: Sequences, length: int) -> torch.Tensor:
    """fp32 attention of sequence 0, for the size of each kernel's own error."""
    group = data.q.shape[1] // data.k.shape[1]
    q, k, v = (t[:length].float().transpose(0, 1) for t in (data.q, data.k, data.v))
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)


def bits(layout: Layout, length: int, only: str) -> None:
    base = make_sequences(layout, 64, [length, *COMPANY])
    exact = reference(base, length)
    rows: list[list[object]] = []
    for name, attend in kernels().items():
        if only in name:
            attempt(name, lambda n=name, a=attend: rows.extend(bits_of_kernel(n, a, layout, base, exact)))
    head_line = ["kernel", "page", "error to fp32", *phase_parts(length)]
    table(f"{layout}, {length} keys: rows unequal to the whole prefill (largest difference)", head_line, rows)
    packed_entries(layout, length)


def bits_of_kernel(
    name: str, attend: Attend, layout: Layout, base: Sequences, exact: torch.Tensor
) -> list[list[object]]:
    length = base.lengths[0]
    q, batch = base.queries([(0, 0, length)])
    want = attend(q, base.k_pages, base.v_pages, batch)
    error = float((want.float() - exact).norm() / exact.norm())
    rows: list[list[object]] = []
    for page in PAGES:
        data = make_sequences(layout, page, [length, *COMPANY])
        cells = [unequal_in_phase(attend, data, batches, want) for batches in phase_parts(length).values()]
        rows.append([name, page, error, *(f"{w}/{n}" + (f" ({e:.1e})" if w else "") for n, w, e in cells)])
    return rows


def packed_entries(layout: Layout, length: int) -> None:
    """The packed (no cache) entry of FA3, as a trainer would call it, against the paged one."""
    data = make_sequences(layout, 16, [length, *COMPANY])
    whole = [(i, 0, n) for i, n in enumerate(data.lengths)]
    q, batch = data.queries(whole)
    rows: list[list[object]] = []
    for name, kernel in {"as is": Fa3(), f"query bound >= {QUERY_BOUND_FLOOR}": Fa3(floor=QUERY_BOUND_FLOOR)}.items():
        paged = kernel.paged(q, data.k_pages, data.v_pages, batch)
        packed = kernel.packed(q, data.k, data.v, batch)
        alone = [
            kernel.packed(data.q[s : s + n], data.k[s : s + n], data.v[s : s + n], batch_of([n], [n], data.tables[:1]))
            for s, n in ((data.start(i), n) for i, n in enumerate(data.lengths))
        ]
        rows.append([name, len(q), unequal_rows(paged, packed)[0], unequal_rows(torch.cat(alone), packed)[0]])
    table(f"{layout}: FA3 packed entry", ["call", "rows", "packed != paged", "packed alone != in company"], rows)
    if length <= 2048:  # the fp32 reference holds every score
        attempt("backward", lambda: backward(layout, length))


def backward(layout: Layout, length: int) -> None:
    """PyTorch's deterministic flash backward, fed with FA3's output and log-sum-exp: bits twice, error to fp32."""
    data = make_sequences(layout, 64, [length, *COMPANY])
    q, batch = data.queries([(i, 0, n) for i, n in enumerate(data.lengths)])
    out, lse = Fa3(floor=QUERY_BOUND_FLOOR).packed_with_lse(q, data.k, data.v, batch)
    grad = torch.randn_like(out)
    zero = torch.zeros(2, dtype=torch.uint64, device="cuda")
    torch.use_deterministic_algorithms(True)

    def run() -> list[torch.Tensor]:
        return torch.ops.aten._flash_attention_backward(
            grad, q, data.k, data.v, out, lse, batch.query_starts, batch.query_starts, batch.max_query,
            batch.max_query, 0.0, True, zero, zero[:1], scale=layout.head**-0.5,
        )  # fmt: skip

    first = run()
    repeats = sum(sum(unequal_rows(a, b)[0] for a, b in zip(first, run(), strict=True)) for _ in range(5))
    torch.use_deterministic_algorithms(False)
    want = fp32_gradients(data, q, grad)
    rows = [[n, float((a.float() - b).norm() / b.norm())] for n, a, b in zip("qkv", first, want, strict=True)]
    title = f"{layout}: flash backward on FA3's output ({repeats} rows unequal in 5 repeats)"
    table(title, ["gradient", "error to fp32"], rows)


def fp32_gradients(data: Sequences, q: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    group = data.q.shape[1] // data.k.shape[1]
    leaves = [t.float().requires_grad_() for t in (q, data.k, data.v)]
    outs = []
    for i, n in enumerate(data.lengths):
        a, b, c = (t[data.start(i) : data.start(i) + n].transpose(0, 1) for t in leaves)
        b, c = b.repeat_interleave(group, 0), c.repeat_interleave(group, 0)
        outs.append(torch.nn.functional.scaled_dot_product_attention(a, b, c, is_causal=True).transpose(0, 1))
    return list(torch.autograd.grad(torch.cat(outs), leaves, grad.float()))


def timing(layout: Layout, only: str) -> None:
    rows: list[list[object]] = []
    shapes = {"decode 64 x 1024": (64, 1024, 1), "decode 8 x 8192": (8, 8192, 1), "prefill 8 x 1024": (8, 1024, 1024)}
    for title, (count, keys, queries) in shapes.items():
        for page in (16, 128):
            sets = [make_sequences(layout, page, [keys] * count, seed) for seed in range(4)]
            batches = [d.queries([(i, keys - queries, keys) for i in range(count)]) for d in sets]
            base = 0.0
            for name, attend in {"FA3 num_splits=0 (stock)": Fa3(num_splits=0).paged, **kernels()}.items():
                if base and only not in name:
                    continue
                calls = [
                    lambda a=attend, d=d, q=q, b=b: a(q, d.k_pages, d.v_pages, b)
                    for d, (q, b) in zip(sets, batches, strict=True)
                ]
                time = attempt(f"{title} {name}", lambda c=calls: graph_us(c))
                base = base or time
                rows.append([title, page, name, time, base / time if time else "-"])
    table(f"{layout}: time", ["shape", "page", "kernel", "us", "speed / stock FA3"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bits", action="store_true")
    parser.add_argument("--timing", action="store_true")
    parser.add_argument("--layout", nargs="*", default=LAYOUTS)
    parser.add_argument("--length", type=int, default=1000)
    parser.add_argument("--only", default="", help="kernels whose name holds these words")
    args = parser.parse_args()
    for text in args.layout:
        layout = Layout(*map(int, text.split(",")))
        if args.bits or not args.timing:
            bits(layout, args.length, args.only)
        if args.timing or not args.bits:
            timing(layout, args.only)


if __name__ == "__main__":
    main()
