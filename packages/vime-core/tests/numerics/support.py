"""What the tests of the numerics share: bit comparison that fails on NaN, inputs by seed, every build there is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from vime_core.numerics import AttentionSpec, KvCache, Operations, PagedBatch, load_provider
from vime_core.numerics.cpu import build
from vime_core.numerics.cpu import provider as cpu_provider

DTYPES = (torch.float32, torch.bfloat16)
PRECISION = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}  # half an ulp of 1, relative


@cache
def everyone() -> dict[str, Operations]:
    """The reference and the cpu provider in every instruction set of this machine."""
    builds = {isa.name: cpu_provider.load(isa.name) for isa in build.supported()}
    assert builds, "this machine runs no build of the cpu provider, so nothing would be compared"
    return {"reference": load_provider("reference"), **builds}


def cpu() -> Operations:
    return next(operations for name, operations in everyone().items() if name != "reference")


def bits(x: Tensor) -> Tensor:
    widths = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
    return x.contiguous().view(widths[x.dtype]) if x.dtype in widths else x


def unequal(a: Tensor, b: Tensor) -> int:
    """How many elements differ in a bit or are NaN."""
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    return int(((bits(a) != bits(b)) | a.isnan() | b.isnan()).sum())


def assert_same(a: Tensor | tuple[Tensor, ...], b: Tensor | tuple[Tensor, ...]) -> None:
    pairs = [(a, b)] if isinstance(a, Tensor) else list(zip(a, b, strict=True))
    for left, right in pairs:
        assert isinstance(left, Tensor)
        assert isinstance(right, Tensor)
        assert left.numel() > 0, "nothing was compared"
        assert unequal(left, right) == 0, f"{unequal(left, right)} of {left.numel()} elements differ"


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def next_up(x: Tensor) -> Tensor:
    """Every element moved by one ulp away from zero."""
    return (bits(x) + 1).view(x.dtype)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def row_violations(operation: Callable[[Tensor], Tensor], rows: Tensor) -> list[int]:
    """Rows of ``operation(rows)`` that change when the row comes alone, last, first, or among other neighbours."""
    whole = operation(rows)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(len(rows)))
    reordered = operation(rows[order])[torch.argsort(order)]
    middle = len(rows) // 2
    strangers = rows.flip(0).clone()
    strangers[middle] = rows[middle]
    bad = {i for i in range(len(rows)) if unequal(whole[i], reordered[i])}
    bad |= {i for i in {0, middle, len(rows) - 1} if unequal(whole[i], operation(rows[i : i + 1])[0])}
    if unequal(whole[middle], operation(strangers)[middle]):
        bad.add(middle)
    bad |= {i for i, row in enumerate(operation(rows[: middle + 1])) if unequal(whole[i], row)}
    return sorted(bad)


def attention_fp64(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """One sequence, written as one would on paper."""
    group, n = q.shape[1] // k.shape[1], len(q)
    q, k, v = (t.double().transpose(0, 1) for t in (q, k, v))
    scores = q @ k.repeat_interleave(group, 0).mT * spec.scale
    if spec.soft_cap:
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    hidden = torch.ones(n, n).triu(1).bool() | torch.ones(n, n).tril(-(spec.window or n)).bool()
    scores = scores.masked_fill(hidden, -math.inf)
    return (scores.softmax(-1) @ v.repeat_interleave(group, 0)).transpose(0, 1), scores.logsumexp(-1).T


class Pages:
    """Sequences of given lengths in a paged cache whose every unused slot holds NaN."""

    def __init__(
        self, keys: list[Tensor], values: list[Tensor], page: int, seed: int, *, layout: str = "split"
    ) -> None:
        heads, dim = keys[0].shape[1:]
        self.page, self.lengths = page, [len(k) for k in keys]
        self.width = max(-(-n // page) for n in self.lengths) + 1
        count = self.width * len(keys) + 3
        self.cache = self._empty(count, heads, dim, keys[0].dtype, layout)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
        self.table = order[: self.width * len(keys)].view(len(keys), self.width)
        self.keys, self.values = keys, values

    def _empty(self, count: int, heads: int, dim: int, dtype: torch.dtype, layout: str) -> KvCache:
        if layout == "split":  # as an engine allocates it: keys, then values, in every block of a head
            both = torch.full((count, heads, 2, self.page, dim), torch.nan, dtype=dtype)
            return KvCache(both[:, :, 0], both[:, :, 1])
        both = torch.full((count, self.page, heads, 2 * dim), torch.nan, dtype=dtype).transpose(1, 2)
        return KvCache(both[..., :dim], both[..., dim:])

    def slots(self, sequence: int, first: int, end: int) -> Tensor:
        at = torch.arange(first, end)
        return self.table[sequence, at // self.page] * self.page + at % self.page

    def run(
        self, operations: Operations, queries: list[Tensor], parts: list[tuple[int, int, int]], spec: AttentionSpec
    ) -> list[Tensor]:
        """One engine step: for every (sequence, first, end) writes those tokens, then asks with their queries."""
        tensors = [torch.cat([source[i][a:b] for i, a, b in parts]) for source in (queries, self.keys, self.values)]
        operations.write_kv(tensors[1], tensors[2], self.cache, torch.cat([self.slots(*part) for part in parts]))
        start = torch.tensor([0, *(b - a for _, a, b in parts)]).cumsum(0).int()
        rows = self.table[[i for i, _, _ in parts]].int()
        batch = PagedBatch(start, torch.tensor([b for _, _, b in parts]).int(), rows)
        return list(operations.attention_paged(tensors[0], self.cache, batch, spec).split([b - a for _, a, b in parts]))
