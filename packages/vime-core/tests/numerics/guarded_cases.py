"""Every C++ and C function that takes pointers and lengths: operands, results and scratch against protected pages.

Run with ``guard.c`` preloaded. An access past either end kills the process; the last line then names the case. A result
that depends on memory that nobody wrote differs from the one without guards.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from vime_core.numerics import AttentionSpec, KvCache, PagedBatch, rope_table
from vime_core.numerics.cpu import build
from vime_core.numerics.cpu import provider as cpu_provider
from vime_core.numerics.kernels import Kernels
from vime_core.record.hash128_native import native

GUARD = ctypes.CDLL(os.environ["LD_PRELOAD"])
MODES = {"end": 1, "begin": 2}
PAGE = 5

Results = Tensor | tuple[Tensor, ...]


@dataclass(frozen=True)
class Case:
    """A function and its operands; those that are None or no tensors are taken as they are."""

    name: str
    run: Callable[..., Results]
    operands: tuple[Tensor | None, ...]


@contextmanager
def guarding(mode: int) -> Iterator[None]:
    GUARD.guard_mode(mode)
    try:
        yield
    finally:
        GUARD.guard_mode(0)


def placed(tensor: Tensor | None, mode: int) -> Tensor | None:
    """A copy with the same strides whose last element ends, or whose first begins, at a protected page."""
    if tensor is None:
        return None
    with guarding(mode):
        copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return copy.copy_(tensor)


def guarded(case: Case, mode: int) -> tuple[Tensor, ...]:
    """Run in a thread of its own, because scratch memory that a thread has grown serves smaller calls too."""
    operands, results = [placed(operand, mode) for operand in case.operands], list[tuple[Tensor, ...]]()

    def run() -> None:
        with guarding(mode):
            results.append(several(case.run(*operands)))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return results[0]


def several(results: Results) -> tuple[Tensor, ...]:
    return (results,) if isinstance(results, Tensor) else results


def differences(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> int:
    total = 0
    for left, right in zip(found, expected, strict=True):
        assert left.shape == right.shape
        assert left.numel() > 0
        total += int(((left != right) | left.isnan() | right.isnan()).sum())
    return total


class Of:
    """Normal numbers of a shape, others at every call."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.generator = dtype, torch.Generator().manual_seed(0)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.dtype)


def by_columns(x: Tensor) -> Tensor:
    return x.t().contiguous().t()


def products(kernels: Kernels, of: Of) -> Iterator[Case]:
    """Few rows and many; one, whole and odd tiles; operands by rows and by columns; chunks that are no whole blocks."""
    sizes = [(1, 1, 1, 1), (5, 9, 33, 1), (4, 8, 64, 1), (7, 11, 138, 2), (97, 50, 71, 1), (3, 96, 66, 2)]
    sizes += [(2, n, 3, 1) for n in range(2, 18)]  # a last store of every length
    for m, n, k, chunks in [*sizes, (103, 17, 1090, 1), (99, 13, 2090, 2)]:
        x, w, bias, size = of(m, k), of(n, k), of(n), f"{m} {n} {k} {chunks}"
        layouts = {"rows": (x, w), "x by columns": (by_columns(x), w), "w by columns": (x, by_columns(w))}
        layouts["both by columns"] = by_columns(x), by_columns(w)
        for layout, pair in layouts.items():
            for wide, b in ((False, bias), (True, None), (True, bias)):
                run = partial(_linear, kernels, chunks, wide)
                yield Case(f"linear {size}, {layout}, wide {wide}, bias {b is not None}", run, (*pair, b))
        yield Case(f"linear_partials {size}", lambda a, b, c=chunks: kernels.linear_partials(a, b, c), (x, w))
        yield Case(f"column_sum {size}", kernels.column_sum, (x,))


def _linear(kernels: Kernels, chunks: int, wide: bool, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    return kernels.linear(x, w, bias, chunks, wide)


def rows(kernels: Kernels, of: Of) -> Iterator[Case]:
    for m, h in ((1, 1), (3, 15), (2, 16), (5, 17), (2, 70)):
        x, w, size = of(m, h), of(h), f"{m} {h}"
        for r in (None, of(m, h)):
            with_r = f"{size} {r is not None}"
            yield Case(f"add_rms_norm {with_r}", lambda *t: kernels.add_rms_norm(*t, 1e-5), (x, r, w))
            backward = (of(m, h), r, x, w)
            yield Case(f"add_rms_norm_backward {with_r}", lambda *t: kernels.add_rms_norm_backward(*t, 1e-5), backward)
        gate_up = of(m, 2 * h)
        yield Case(f"swiglu {size}", kernels.swiglu, (gate_up,))
        yield Case(f"swiglu_backward {size}", kernels.swiglu_backward, (of(m, h), gate_up))


def turns(kernels: Kernels, of: Of) -> Iterator[Case]:
    positions = torch.tensor([0, 6, 3])
    for rotary, rest in ((2, 0), (16, 1), (32, 0), (34, 5)):
        table, joint = rope_table(7, rotary, 1e4), of(3, 3, rotary + rest)
        for interleaved in (False, True):
            for x in (joint, joint[:, 1:], joint[:, :2]):
                for inverse in (False, True):
                    run = partial(_rope, kernels, interleaved, inverse)
                    name = f"rope {rotary} {rest} {interleaved} {inverse} {x.storage_offset()} {x.shape[1]}"
                    yield Case(name, run, (x, positions, table))


def _rope(kernels: Kernels, interleaved: bool, inverse: bool, x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    return kernels.rope(x, positions, table, interleaved, inverse)


def scores(kernels: Kernels, of: Of) -> Iterator[Case]:
    for m, v in ((1, 1), (2, 15), (2, 16), (3, 33), (2, 257)):
        logits, size = of(m, v), f"{m} {v}"
        temperatures, ids = torch.full((m,), 0.7), torch.arange(m) * (v - 1) // max(m - 1, 1)
        top_k, top_p = torch.full((m,), max(v // 2, 1)), torch.full((m,), 0.8)
        yield Case(f"log_softmax {size}", kernels.log_softmax, (logits, temperatures))
        yield Case(f"token_log_probs {size}", kernels.token_log_probs, (logits, ids, temperatures))
        back = (torch.ones(m), logits, ids, temperatures)
        yield Case(f"token_log_probs_backward {size}", kernels.token_log_probs_backward, back)
        yield Case(f"keep_mask {size}", kernels.keep_mask, (logits, temperatures, top_k, top_p))
        for u in (torch.full((m,), -1), torch.full((m,), 2**63 - 1)):
            yield Case(f"draw {size} {u[0]}", kernels.draw, (logits, temperatures, u))


def attention(kernels: Kernels, of: Of) -> Iterator[Case]:
    cu, specs = torch.tensor([0, 1, 1, 9, 29]), (AttentionSpec(0.2), AttentionSpec(0.2, window=5, soft_cap=3.0))
    for heads, kv_heads, dim in ((1, 1, 1), (7, 1, 20), (4, 2, 32), (6, 2, 129)):
        q, k, v, dy = (of(29, n, dim) for n in (heads, kv_heads, kv_heads, heads))
        joint = of(29, heads + 2 * kv_heads, dim)
        strided = joint.split([heads, kv_heads, kv_heads], 1)
        for spec in specs:
            name = f"{heads} {kv_heads} {dim} {spec.window}"
            packed = lambda a, b, c, d, s=spec: kernels.attention_packed(a, b, c, d, s)  # noqa: E731
            yield Case(f"attention_packed {name}", packed, (q, k, v, cu))
            yield Case(f"attention_packed of slices {name}", packed, (*strided, cu))
            o, lse = kernels.attention_packed(q, k, v, cu, spec)
            backward = lambda *t, s=spec: kernels.attention_backward(*t, s)  # noqa: E731
            yield Case(f"attention_backward {name}", backward, (dy, q, k, v, o, lse, cu))
            yield from paged(kernels, name, spec, (q, k, v))


def paged(kernels: Kernels, name: str, spec: AttentionSpec, qkv: tuple[Tensor, Tensor, Tensor]) -> Iterator[Case]:
    """Sequences of 9 and 20 tokens; of the first the last is asked for. The first and the last slot are in use."""
    q, k, v = qkv
    heads, dim = k.shape[1:]
    table = torch.tensor([[4, 0, 2, 5], [1, 6, 3, 7]]).int()
    slots = torch.cat([table[s, torch.arange(n) // PAGE] * PAGE + torch.arange(n) % PAGE for s, n in ((0, 9), (1, 20))])
    split = torch.full((8, heads, 2, PAGE, dim), 7.0, dtype=q.dtype).unbind(2)
    joint = torch.full((8, PAGE, heads, 2 * dim), 7.0, dtype=q.dtype).transpose(1, 2).split(dim, -1)
    padded = torch.where(torch.arange(29) == 8, -1, slots)
    where = (torch.tensor([0, 1, 21]), torch.tensor([9, 20]), table)
    for layout, caches in (("split", split), ("interleaved", joint)):
        yield Case(f"write_kv {layout} {name}", partial(_write, kernels), (k, v, padded, *caches))
        kernels.write_kv(k, v, KvCache(*caches), slots)
        asked = partial(_attend, kernels, spec)
        yield Case(f"attention_paged {layout} {name}", asked, (q[8:], torch.zeros_like(q[8:]), *caches, *where))


def _write(kernels: Kernels, k: Tensor, v: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> Results:
    kernels.write_kv(k, v, KvCache(keys, values), slots)
    return keys, values


def _attend(
    kernels: Kernels, spec: AttentionSpec, q: Tensor, o: Tensor, keys: Tensor, values: Tensor, *batch: Tensor
) -> Tensor:
    kernels.attention_paged(q, KvCache(keys, values), PagedBatch(*batch), spec, o)
    return o


def digests() -> Iterator[Case]:
    compiled = native().hash
    assert compiled is not None, native().reason

    def digest(data: Tensor) -> Tensor:
        return torch.frombuffer(bytearray(compiled(data.numpy())), dtype=torch.int64)

    for size in (1, 3, 8191, 8192, 8193, 4 * 8192, 6 * 8192 + 5):
        yield Case(f"hash128 {size}", digest, ((torch.arange(size) * 151 % 256).byte(),))


def every_case() -> Iterator[Case]:
    yield from digests()
    for isa in build.supported():
        kernels = cpu_provider.load(isa.name).kernels
        for dtype in (torch.float32, torch.bfloat16):
            for family in (products, rows, turns, scores, attention):
                for case in family(kernels, Of(dtype)):
                    yield replace(case, name=f"{isa.name} {dtype}: {case.name}")


def control(mode: str) -> None:
    """One byte too many at that end, which must not return."""
    data = placed(torch.ones(5, dtype=torch.uint8), MODES[mode])
    assert data is not None
    ctypes.string_at(data.data_ptr() - (mode == "begin"), 6)


def main() -> None:
    """Name every case before it runs, and every one that gives other bits than without guards."""
    compared = 0
    for case in every_case():
        expected = several(case.run(*[operand if operand is None else operand.clone() for operand in case.operands]))
        for name, mode in MODES.items():
            print(f"{case.name}, {name}", flush=True)
            found = differences(guarded(case, mode), expected)
            compared += 1
            if found:
                print(f"UNEQUAL {found}", flush=True)
    print(f"compared {compared}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    control(sys.argv[1]) if len(sys.argv) > 1 else main()
