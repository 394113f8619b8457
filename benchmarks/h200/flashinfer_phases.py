"""Do FlashInfer's kernels give the same attention bits in prefill, chunks, prefix hits, decode and company?

    python flashinfer_phases.py [--layout HEAD,HEADS,KV ...] [--length N] [--only WORDS] [--pages P ...]

The phases are those of `attention_phases.py`: every row is compared with one whole-sequence prefill by the same way of
calling (alone, page 64). FlashInfer compiles each kernel by nvcc when it is first planned.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from attention_phases import COMPANY, LAYOUTS, Attend, Layout, make_sequences, phase_parts, reference, unequal_in_phase
from fa3 import Paged
from measure import attempt, table

WORKSPACE = 2 << 30  # what vLLM gives it in batch-invariant mode


@dataclass
class FlashInfer:
    """One way of calling it. ``decode`` None: rows of one query go through the prefill wrapper too.

    vLLM gives requests with one query to the decode wrapper (on tensor cores) and the others to the prefill wrapper.
    """

    prefill: str = "auto"
    decode: str | None = "auto"
    prefill_plan: dict[str, Any] = field(default_factory=dict)
    decode_plan: dict[str, Any] = field(default_factory=dict)
    wrappers: dict[str, Any] = field(default_factory=dict)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Paged) -> torch.Tensor:
        counts = batch.query_starts.diff().tolist()
        one = [i for i, n in enumerate(counts) if n == 1 and self.decode is not None]
        more = [i for i in range(len(counts)) if i not in one]
        out = torch.empty_like(q)
        for requests, call in ((one, self._decode), (more, self._prefill)):
            if requests:
                starts = batch.query_starts.tolist()
                rows = torch.tensor([r for i in requests for r in range(starts[i], starts[i + 1])], device=q.device)
                out[rows] = call(q[rows], (k, v), pages_of(batch, requests, k.shape[1]), [counts[i] for i in requests])
        return out

    def _prefill(self, q: torch.Tensor, cache: Any, pages: list[torch.Tensor], counts: list[int]) -> torch.Tensor:
        starts = torch.tensor([sum(counts[:i]) for i in range(len(counts) + 1)], dtype=torch.int32)
        wrapper = self._wrapper("BatchPrefillWithPagedKVCacheWrapper", backend=self.prefill)
        wrapper.plan(starts, *pages, *shape_of(q, cache), causal=True, **types(q), **self.prefill_plan)
        return wrapper.run(q, cache)

    def _decode(self, q: torch.Tensor, cache: Any, pages: list[torch.Tensor], counts: list[int]) -> torch.Tensor:
        del counts
        wrapper = self._wrapper("BatchDecodeWithPagedKVCacheWrapper", backend=self.decode, use_tensor_cores=True)
        wrapper.plan(*pages, *shape_of(q, cache), **types(q), **self.decode_plan)
        return wrapper.run(q, cache)

    def _wrapper(self, name: str, **options: Any) -> Any:
        import flashinfer

        if name not in self.wrappers:
            self.wrappers[name] = getattr(flashinfer, name)(workspace(), "NHD", **options)
        return self.wrappers[name]


def workspace(made: list[torch.Tensor] = []) -> torch.Tensor:  # noqa: B006  (one for all)
    if not made:
        made.append(torch.zeros(WORKSPACE, dtype=torch.uint8, device="cuda"))
    return made[0]


def pages_of(batch: Paged, requests: list[int], size: int) -> list[torch.Tensor]:
    """(starts, page numbers, tokens in the last page) of some requests: int32, the numbers on the GPU."""
    keys = [batch.seq_lens.tolist()[i] for i in requests]
    used = [-(-n // size) for n in keys]
    starts = torch.tensor([sum(used[:i]) for i in range(len(used) + 1)], dtype=torch.int32)
    numbers = torch.cat([batch.block_table[i, :n] for i, n in zip(requests, used, strict=True)]).int()
    last = torch.tensor([n - (u - 1) * size for n, u in zip(keys, used, strict=True)], dtype=torch.int32)
    return [starts, numbers, last]


def shape_of(q: torch.Tensor, cache: Any) -> tuple[int, int, int, int]:
    return q.shape[1], cache[0].shape[2], q.shape[2], cache[0].shape[1]


def types(q: torch.Tensor) -> dict[str, Any]:
    return {"q_data_type": q.dtype, "kv_data_type": q.dtype, "sm_scale": q.shape[-1] ** -0.5}


def ways() -> dict[str, Attend]:
    whole = {"disable_split_kv": True}
    split = {"fixed_split_size": 2048, **whole}, {"fixed_split_size": 4096, **whole}
    return {
        "as vLLM calls it": FlashInfer(),
        "as vLLM would, batch-invariant": FlashInfer(decode_plan=split[0], prefill_plan=split[1]),
        "FA2, keys not split": FlashInfer("fa2", "fa2", whole, whole),
        "FA2 prefill for every row, keys not split": FlashInfer("fa2", None, whole),
        "FA2 prefill for every row, keys split at 4 pages": FlashInfer("fa2", None, {"fixed_split_size": 4}),
        "FA3 prefill for every row": FlashInfer("fa3", None),
    }


def measured(name: str, attend: Callable[..., torch.Tensor], layout: Layout, pages: list[int], length: int) -> Any:
    """A row for each page size: unequal rows of each phase, and this call's own error."""
    begun = time.time()
    base = make_sequences(layout, 64, [length, *COMPANY])
    q, batch = base.queries([(0, 0, length)])
    want = attend(q, base.k_pages, base.v_pages, batch)
    exact = reference(base, length)
    error = float((want.float() - exact).norm() / exact.norm())
    print(f"{name}: first call {time.time() - begun:.0f} s", flush=True)
    for page in pages:
        data = make_sequences(layout, page, [length, *COMPANY])
        cells = [unequal_in_phase(attend, data, batches, want) for batches in phase_parts(length).values()]
        yield [name, page, error, *(f"{w}/{n}" + (f" ({e:.1e})" if w else "") for n, w, e in cells)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layout", nargs="*", default=LAYOUTS)
    parser.add_argument("--length", type=int, default=1000)
    parser.add_argument("--pages", nargs="*", type=int, default=[16, 64])
    parser.add_argument("--only", default="", help="ways whose name holds these words")
    args = parser.parse_args()
    for text in args.layout:
        compare(Layout(*map(int, text.split(","))), args.pages, args.length, args.only)


def compare(layout: Layout, pages: list[int], length: int, only: str) -> None:
    rows: list[list[object]] = []
    for name, attend in ways().items():
        if only in name:
            attempt(name, lambda n=name, a=attend: rows.extend(measured(n, a, layout, pages, length)))
    head = ["way", "page", "error to fp32", *phase_parts(length)]
    table(f"{layout}, {length} keys: rows unequal to the whole prefill (largest difference)", head, rows)


if __name__ == "__main__":
    main()
