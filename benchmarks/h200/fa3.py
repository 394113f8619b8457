"""FlashAttention 3 as bundled with vLLM, with the arguments that decide its tiles exposed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# A query-length bound below 64 / group size selects one warp group and, for head size 64, key blocks of 192 instead
# of 128; a bound of 1 also drops the causal mask (and with it the 128 blocks). A bound of 65 excludes both.
QUERY_BOUND_FLOOR = 65


@dataclass(frozen=True)
class Fa3:
    """One way of calling the kernel. The query-length bound that it is told lies in [floor, ceiling].

    A ceiling understates the true length: an experiment, to force the small tile on every phase.
    """

    floor: int = 1
    ceiling: int | None = None
    num_splits: int = 1
    pack_gqa: bool | None = None

    def paged(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Paged, schedule: torch.Tensor | None = None
    ) -> torch.Tensor:
        """q (tokens, heads, size); k, v (pages, page size, kv heads, size); a schedule is that of `schedule`."""
        return self._call(q, k, v, batch, None, batch.seq_lens, batch.block_table, schedule)[0]

    def scheduled(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Paged) -> torch.Tensor:
        """`paged` with its schedule made ahead."""
        return self.paged(q, k, v, batch, self.schedule(q, k, batch))

    def schedule(self, q: torch.Tensor, k: torch.Tensor, batch: Paged) -> torch.Tensor:
        """What the kernel otherwise makes at its beginning, for every layer of a step with these shapes of q and k."""
        import vllm.vllm_flash_attn  # noqa: F401  (loads the operator library)

        heads, size = q.shape[1:]
        return torch.ops._vllm_fa3_C.get_scheduler_metadata(
            len(batch.seq_lens), self._bound(batch), batch.max_keys, heads, k.shape[2], size, size, q.dtype,
            batch.seq_lens, batch.query_starts, None, None, None, None, k.shape[1], 0, True, -1, -1, False,
            self.num_splits, self.pack_gqa, 0,
        )  # fmt: skip

    def packed(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Paged) -> torch.Tensor:
        """q, k, v (tokens, heads, size) of whole sequences, no cache."""
        return self._call(q, k, v, batch, batch.query_starts, None, None)[0]

    def packed_with_lse(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Paged
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out = self._call(q, k, v, batch, batch.query_starts, None, None)
        return out[0], out[1]

    def _bound(self, batch: Paged) -> int:
        bound = max(batch.max_query, self.floor)
        return bound if self.ceiling is None else min(bound, self.ceiling)

    def _call(  # type: ignore[no-untyped-def]
        self, q, k, v, batch, key_starts, seq_used, table, schedule=None
    ) -> list[torch.Tensor]:
        import vllm.vllm_flash_attn  # noqa: F401  (loads the operator library)

        no_rotary = (None, None, None)
        no_scales = (None, None, None)
        return torch.ops._vllm_fa3_C.fwd(
            q, k, v, None, None, None, None, batch.query_starts, key_starts, None, None, seq_used, self._bound(batch),
            batch.max_keys, table, None, None, *no_rotary, *no_scales, q.shape[-1] ** -0.5, True, -1, -1, 0.0, True,
            schedule, self.num_splits, self.pack_gqa, 0, None, 1, 0, None,
        )  # fmt: skip


@dataclass(frozen=True)
class Paged:
    """A batch: query_starts (n + 1,), seq_lens (n,) in keys, block_table (n, pages), all int32 on the GPU."""

    query_starts: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    max_query: int
    max_keys: int
