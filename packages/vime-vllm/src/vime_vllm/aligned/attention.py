"""vLLM's attention layer with the contract's operations inside: an own backend with its own metadata."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)

from vime_core.errors import PolicyError
from vime_core.numerics import AttentionSpec, KvCache, Operations, PagedBatch
from vime_vllm import compat


@dataclass
class AlignedMetadata(AttentionMetadata):
    """Which tokens ask which pages in one engine step."""

    batch: PagedBatch


class AlignedMetadataBuilder(AttentionMetadataBuilder[AlignedMetadata]):
    """Passes on what the scheduler decided. No cascade, no reordering, no split that depends on the batch."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> AlignedMetadata:
        """See vLLM's `AttentionMetadataBuilder`."""
        del fast_build
        common = common_attn_metadata
        require_causal(common_prefix_len, common)
        most = int(common.max_query_len)
        batch = PagedBatch(common.query_start_loc, common.seq_lens, common.block_table_tensor, most)
        return AlignedMetadata(batch)

    def use_cascade_attention(self, *args: Any, **kwargs: Any) -> bool:
        """Never; vLLM up to 0.26 asks."""
        del args, kwargs
        return False


class AlignedAttentionImpl(AttentionImpl[AlignedMetadata]):
    """Writes keys and values by the contract's ``write_kv`` and attends by its ``attention_paged``.

    Args:
        operations: the contract's operations; vLLM passes it through from its attention layer's arguments.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        *,
        operations: Operations,
    ) -> None:
        if alibi_slopes is not None or attn_type != AttentionType.DECODER or kv_sharing_target_layer_name is not None:
            raise _refused("ALiBi, encoder attention or a shared KV cache")
        self.num_heads, self.head_size = num_heads, head_size
        self.num_kv_heads = num_kv_heads or num_heads
        self.scale, self.sliding_window, self.kv_cache_dtype = scale, sliding_window, kv_cache_dtype
        self.operations = operations
        self.spec = AttentionSpec(scale, sliding_window, logits_soft_cap or None)

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Copy key and value (T, KV heads, dim) to their slots."""
        del layer
        self.operations.write_kv(key, value, paged(kv_cache), slot_mapping)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: AlignedMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Fill ``output`` (T, heads, dim) from query (T, heads, dim) and the cache.

        Rows that no request asks, of a step's padding, stay as they are. Nothing reads them
        (`vime_core.numerics.attention`).
        """
        del layer, key, value
        if output_scale is not None or output_block_scale is not None:
            raise _refused("a quantised attention output")
        if attn_metadata is None:  # vLLM measures memory with a forward that has no batch
            return output.zero_()
        return self.operations.attention_paged(query, paged(kv_cache), attn_metadata.batch, self.spec, output)


class AnyPageBackend(AttentionBackend):
    """What vLLM asks an attention backend, as every backend of an alignment contract answers."""

    @staticmethod
    def get_name() -> str:
        """A name that vLLM's enumeration of backends has."""
        return "CUSTOM"

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Any: a page size changes no bit."""
        del kv_cache_spec
        return [MultipleOf(1)]

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supported_kv_cache_layouts(cls) -> Any:
        """Heads outside of slots (asked by 0.32)."""
        return compat.head_major_layouts()


class AlignedAttentionBackend(AnyPageBackend):
    """Chosen explicitly by `vime_vllm.aligned.modules.attention_layer`."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float32]
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_impl_cls() -> type[AlignedAttentionImpl]:
        return AlignedAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[AlignedMetadataBuilder]:
        return AlignedMetadataBuilder

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """The same layout (asked by 0.26)."""
        del cache_dtype_str
        return num_blocks, num_kv_heads, block_size, 2 * head_size

    @classmethod
    def get_required_kv_cache_layout(cls) -> str:
        """The same layout (asked by 0.26)."""
        return "HND"


def paged(kv_cache: Tensor) -> KvCache:
    """Keys and values in vLLM's tensor (pages, KV heads, page size, 2 x head dim).

    Within a page and head all keys lie before all values: interleaved row by row they cost a third of the speed.
    """
    pages, heads, page, both = kv_cache.shape
    keys, values = kv_cache.view(pages, heads, 2 * page, both // 2).chunk(2, dim=2)
    return KvCache(keys, values)


def require_causal(common_prefix_len: int, common: Any) -> None:
    """Raise PolicyError for what no contract defines: cascade or non-causal attention in vLLM's common metadata."""
    if common_prefix_len or common.causal is not True:
        raise _refused("cascade or non-causal attention")


def _refused(what: str) -> PolicyError:
    return PolicyError(
        f"{what} has no definition in the alignment contract",
        remedy="Take a structure without it, or set alignment.contract to empty.",
        code="VIME-ALIGN-026",
    )
