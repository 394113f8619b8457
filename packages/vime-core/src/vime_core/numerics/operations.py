"""The object that both sides of a contract are built from: the operations of one provider, and what runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vime_core.numerics import (
    attention,
    draw,
    embedding,
    linear,
    log_probs,
    rms_norm,
    rope,
    rotary_attention,
    soft_cap,
    swiglu,
    truncation,
)
from vime_core.numerics.attention import AttentionSpec, KvCache, PagedBatch
from vime_core.numerics.kernels import Kernels
from vime_core.numerics.rotary_attention import Seen


@dataclass(frozen=True)
class Operations:
    """The operations of the dense contract, differentiable, of one provider.

    Each method is the entry of the module of its name, where shapes and errors are documented.

    Args:
        provider: ``reference``, ``cpu``, ...
        digest: what runs: sources and kernel parameters; both sides of a contract must report the same.
        parameters: what went into the digest, for the record.
        details: what did not, because no bit depends on it (instruction set, path of the build).
        kernels: the provider's functions.
    """

    provider: str
    digest: str
    parameters: Mapping[str, str]
    details: Mapping[str, str]
    kernels: Kernels

    def _defines(self, *operations: str) -> bool:
        """Whether a contract's own operations define one of these anew: what joins several then calls that one."""
        return any(getattr(type(self), name) is not getattr(Operations, name) for name in operations)

    def embedding(self, ids: Tensor, weight: Tensor) -> Tensor:
        return embedding.embedding(self.kernels, ids, weight)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, chunks: int | None = None) -> Tensor:
        return linear.linear(self.kernels, x, weight, bias, chunks)

    def chunk_count(self, n: int, k: int) -> int:
        """Into how many chunks a weight of the *global* size (n, k) divides k; for tensor-parallel shards."""
        return self.kernels.chunk_count(n, k)

    def linear_partials(self, x: Tensor, weight: Tensor, chunks: int) -> Tensor:
        """The fp32 chunk sums (chunks, ..., N) of a shard of K; without a gradient."""
        return self.kernels.linear_partials(x, weight, chunks)

    def sum_partials(self, partials: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        return linear.sum_partials(partials, bias, dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm.rms_norm(self.kernels, x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return rms_norm.add_rms_norm(self.kernels, x, residual, weight, eps)

    def residual_sum(self, x: Tensor, residual: Tensor) -> Tensor:
        if self._defines("add_rms_norm"):
            unused = torch.ones(x.shape[-1], dtype=x.dtype, device=x.device)
            return self.add_rms_norm(x, residual, unused, 1.0)[1]
        return rms_norm.residual_sum(self.kernels, x, residual)

    def rope(self, x: Tensor, positions: Tensor, table: Tensor, interleaved: bool = False) -> Tensor:
        return rope.rope(self.kernels, x, positions, table, interleaved)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        return swiglu.swiglu(self.kernels, gate_up)

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        return soft_cap.soft_cap(x, cap)

    def attention_packed(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        return attention.attention_packed(self.kernels, q, k, v, cu_seqlens, spec)

    def rotary_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        table: Tensor,
        cu_seqlens: Tensor,
        spec: AttentionSpec,
        seen: Seen = lambda _name, _rows: None,
    ) -> Tensor:
        if self._defines("rope", "attention_packed"):
            q, k = (self.rope(x.contiguous(), positions, table) for x in (q, k))
            seen("q_rope", q)
            seen("k_rope", k)
            return self.attention_packed(q, k, v.contiguous(), cu_seqlens, spec)[0]
        return rotary_attention.rotary_attention(self.kernels, q, k, v, positions, table, cu_seqlens, spec, seen)

    def attention_paged(
        self, q: Tensor, cache: KvCache, batch: PagedBatch, spec: AttentionSpec, out: Tensor | None = None
    ) -> Tensor:
        return attention.attention_paged(self.kernels, q, cache, batch, spec, out)

    def write_kv(self, k: Tensor, v: Tensor, cache: KvCache, slots: Tensor) -> None:
        """Copies k and v (T, KV heads, dim) to ``slots`` (page * page size + offset); a negative one is padding."""
        self.kernels.write_kv(k, v, cache, slots)

    def log_softmax(self, logits: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
        return log_probs.log_softmax(self.kernels, logits, temperature)

    def token_log_probs(self, logits: Tensor, token_ids: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
        return log_probs.token_log_probs(self.kernels, logits, token_ids, temperature)

    def keep_mask(
        self,
        logits: Tensor,
        temperature: float | Tensor = 1.0,
        top_k: int | Tensor = 0,
        top_p: float | Tensor = 1.0,
    ) -> Tensor:
        return truncation.keep_mask(self.kernels, logits, temperature, top_k, top_p)

    def draw_numbers(self, seeds: Tensor, places: Tensor) -> Tensor:
        """u int64 (rows) of seeds int64 (rows) and places in the response, from 0, int64 (rows); see `draw`."""
        return self.kernels.draw_numbers(seeds, places)

    def draw(self, logits: Tensor, u: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
        return draw.draw(self.kernels, logits, u, temperature)


def provider_digest(parameters: Mapping[str, str]) -> str:
    """The digest of what runs: SHA-256 over the sorted parameters."""
    return hashlib.sha256(json.dumps(dict(parameters), sort_keys=True).encode()).hexdigest()


def source_digest(files: Iterable[Path]) -> str:
    """SHA-256 over names and contents of source files, in the order of their names."""
    total = hashlib.sha256()
    for file in sorted(files, key=lambda f: f.name):
        total.update(file.name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return total.hexdigest()


def shared_sources() -> list[Path]:
    """The modules that every provider runs: autograd entries and the operations without a kernel."""
    return list(Path(__file__).parent.glob("*.py"))
