"""FlashAttention 3 as vLLM bundles it, called so that every phase walks the same blocks of keys (docs/probes-h200.md).

One split of the keys, and a bound of the query lengths that is never below 65, because for head size 64 a smaller one
selects a tile with other blocks. The bound itself changes no bit, so all tokens are one. No schedule is made ahead:
with one split the library clears a schedule's counter behind every call, so that no kernel would be saved.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from vime_core.numerics.attention import AttentionSpec, KvCache, PagedBatch
from vime_core.numerics.offers import AttentionOffer
from vime_core.numerics.operations import source_digest

LIBRARY: Final = "vllm.vllm_flash_attn.flash_attn_interface"
CAPABILITY: Final = (9, 0)
HEAD_SIZES: Final = (64, 128)
"""With both sizes every phase was compared; others have tiles that may depend on the page size."""
LEAST_BOUND: Final = 65


@cache
def offer() -> AttentionOffer | str:
    """The offer, or why FlashAttention 3 cannot run in this process."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != CAPABILITY:
        return "FlashAttention 3 needs a GPU of capability 9.0"
    if find_spec("vllm") is None or find_spec(LIBRARY) is None:
        return f"{LIBRARY} is not installed"
    library = import_module(LIBRARY)
    if not getattr(library, "FA3_AVAILABLE", False):
        return f"this vLLM has no FlashAttention 3: {getattr(library, 'FA3_UNAVAILABLE_REASON', 'unknown')}"
    version = f"vllm {import_module('vllm').__version__} {source_digest([Path(__file__)])}"
    return AttentionOffer("fa3", version, covers, packed, paged)


def covers(head_dim: int, dtype: torch.dtype, spec: AttentionSpec) -> bool:
    """Plain causal attention in bf16 of the head sizes that were probed."""
    plain = spec.window is None and spec.soft_cap is None
    return plain and dtype == torch.bfloat16 and head_dim in HEAD_SIZES


def packed(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """(o (T, heads, dim), lse (T, heads) in fp32, natural logarithm)."""
    o = torch.empty_like(q, memory_format=torch.contiguous_format)
    tokens = q.shape[0]
    if not tokens:
        return o, torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    starts = cu_seqlens.to(torch.int32)
    lse = _forward(q, k, v, o, spec, starts, tokens, tokens, key_starts=starts)
    return o, lse.t().contiguous()


def paged(q: Tensor, cache: KvCache, batch: PagedBatch, spec: AttentionSpec, o: Tensor) -> None:
    """Fills the asked rows of o (T, heads, dim)."""
    if not len(q) or not len(batch.seq_lens):
        return
    keys, values = cache.keys.transpose(1, 2), cache.values.transpose(1, 2)
    most = len(q) if batch.most_queries is None else batch.most_queries
    longest = batch.block_table.shape[1] * keys.shape[1]
    starts, lengths, table = (t.to(torch.int32) for t in (batch.query_start, batch.seq_lens, batch.block_table))
    _forward(q, keys, values, o, spec, starts, most, longest, lengths=lengths, table=table)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    spec: AttentionSpec,
    starts: Tensor,
    most_queries: int,
    most_keys: int,
    *,
    key_starts: Tensor | None = None,
    lengths: Tensor | None = None,
    table: Tensor | None = None,
) -> Tensor:
    """Fills o (T, heads, dim); gives the log-sum-exp (heads, T)."""
    operator: Any = torch.ops._vllm_fa3_C.fwd
    none_of_rotary, none_of_scales = (None, None, None), (None, None, None)
    bound = max(most_queries, LEAST_BOUND)
    found = operator(
        q, k, v, None, None, None, o, starts, key_starts, None, None, lengths, bound, most_keys, table, None, None,
        *none_of_rotary, *none_of_scales, spec.scale, True, -1, -1, 0.0, True, None, 1, None, 0, None, 1, 0, None,
    )  # fmt: skip
    return found[1]
