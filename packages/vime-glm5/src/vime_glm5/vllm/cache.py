"""What vLLM pages for GLM-5: one row of bytes a token and layer, and which tokens an engine step computes."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadata, AttentionMetadataBuilder
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from vime_vllm.aligned.attention import AnyPageBackend, require_causal


@dataclass(frozen=True)
class Request:
    """The tokens ``first .. end - 1`` of a step, the last of ``length`` in the cache, on pages ``pages`` (P)."""

    first: int
    end: int
    length: int
    pages: Tensor


@dataclass
class RowMetadata(AttentionMetadata):
    """Where the tokens of a step go (slots, negative for padding), and whose they are."""

    tokens: int
    slots: Tensor
    query_start: Tensor
    seq_lens: Tensor
    block_table: Tensor

    def requests(self) -> Iterator[Request]:
        """Each request with tokens in this step."""
        ends: list[int] = cast("Any", self.query_start).tolist()
        lengths: list[int] = cast("Any", self.seq_lens).tolist()
        for (first, end), length, pages in zip(pairwise(ends), lengths, self.block_table, strict=False):
            if end > first:
                yield Request(first, end, length, pages.long())


class RowMetadataBuilder(AttentionMetadataBuilder[RowMetadata]):
    """Passes on what the scheduler decided: no split of prefill and decode, no reordering."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> RowMetadata:
        """See vLLM's `AttentionMetadataBuilder`."""
        del fast_build
        common = common_attn_metadata
        require_causal(common_prefix_len, common)
        slots = common.slot_mapping[: common.num_actual_tokens]
        return RowMetadata(
            common.num_actual_tokens, slots, common.query_start_loc, common.seq_lens, common.block_table_tensor
        )


class RowBackend(AnyPageBackend):
    """A page holds its rows one after another. No kernel of vLLM's reads them; the layers of GLM-5 do."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.uint8]

    @staticmethod
    def get_impl_cls() -> Any:
        raise NotImplementedError

    @staticmethod
    def get_builder_cls() -> type[RowMetadataBuilder]:
        return RowMetadataBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """(pages, 1, page size, width) (asked by 0.26)."""
        del cache_dtype_str
        return num_blocks, num_kv_heads, block_size, head_size


class RowCache(nn.Module, AttentionLayerBase):
    """The pages of one layer: ``width`` bytes a token.

    Args:
        vllm_config: the engine's.
        prefix: a name that no other cache has, with the layer's number in it.
        width: bytes of a row.
    """

    def __init__(self, vllm_config: Any, prefix: str, width: int) -> None:
        super().__init__()
        self.prefix, self.width = prefix, width
        self.attn_backend = RowBackend
        self.kv_cache = torch.tensor([])
        layers = vllm_config.compilation_config.static_forward_context
        if prefix in layers:
            raise ValueError(f"two caches are named {prefix!r}")
        layers[prefix] = self

    def get_attn_backend(self) -> type[AttentionBackend]:
        return RowBackend

    def get_kv_cache_spec(self, vllm_config: Any) -> MLAAttentionSpec:
        """One vector a token, neither key nor value to vLLM.

        vLLM up to 0.26 takes caches for one kind that differ in their rows' size alone, hence the name of their format.
        """
        size, name = vllm_config.cache_config.block_size, f"rows of {self.width} bytes"
        return MLAAttentionSpec(
            block_size=size, num_kv_heads=1, head_size=self.width, dtype=torch.uint8, cache_dtype_str=name
        )

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        """uint8 (pages, 1, page size, width) from vLLM."""
        self.kv_cache = kv_cache

    def metadata(self) -> RowMetadata | None:
        """Of the present step; None while vLLM measures memory."""
        given: Any = get_forward_context().attn_metadata
        return None if given is None else given[self.prefix]

    def write(self, rows: Tensor, slots: Tensor) -> None:
        """Store rows (T, width) at slots (T)."""
        real = slots >= 0
        at = slots[real].long()
        pages = self._pages()
        pages[at // pages.shape[1], at % pages.shape[1]] = rows[: len(slots)][real]

    def read(self, request: Request, positions: Tensor) -> Tensor:
        """Rows (n, width) of a request's tokens at positions (n), through its block table."""
        at, pages = positions.long(), self._pages()
        return pages[request.pages[at // pages.shape[1]], at % pages.shape[1]]

    def _pages(self) -> Tensor:
        """(pages, page size, width); the page size is the tensor's own, which vLLM settles after the model is built."""
        return self.kv_cache.squeeze(1)
