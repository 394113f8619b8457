"""What vLLM's attention layer is given, without an engine: its metadata, its call, and what it must refuse."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from vime_core.errors import PolicyError
from vime_core.numerics import AttentionSpec, KvCache, PagedBatch, load_provider

OPERATIONS = load_provider("cpu")
HEADS, KV_HEADS, DIM, PAGE, WINDOW = 4, 2, 8, 4, 5
SCALE, CAP = 0.3, 2.0
START, LENGTHS, TABLE = torch.tensor([0, 3, 4]), torch.tensor([7, 2]), torch.tensor([[2, 0], [3, 1]])
SLOTS = torch.tensor([0, 1, 2, 13, -1])  # positions 4 to 6 of the first request, 1 of the second, and padding


def implementation(**changes: Any) -> Any:
    from vime_vllm.aligned.attention import AlignedAttentionImpl

    settings = {"num_kv_heads": KV_HEADS, "sliding_window": WINDOW, "logits_soft_cap": CAP, **changes}
    return AlignedAttentionImpl(HEADS, DIM, SCALE, operations=OPERATIONS, **settings)


def common(**changes: Any) -> Any:
    """vLLM's metadata of a step of four tokens; beside them lies one of padding."""
    settings = {"query_start_loc": START, "seq_lens": LENGTHS, "block_table_tensor": TABLE, "max_query_len": 3}
    return SimpleNamespace(**{**settings, "causal": True, **changes})


def built(common_prefix: int = 0, **changes: Any) -> Any:
    from vime_vllm.aligned.attention import AlignedMetadataBuilder

    return AlignedMetadataBuilder.build(object.__new__(AlignedMetadataBuilder), common_prefix, common(**changes))


def tokens(seed: int, heads: int) -> Tensor:
    return torch.randn(5, heads, DIM, generator=torch.Generator().manual_seed(seed))


def test_a_step_writes_its_keys_and_attends_over_its_own_pages() -> None:
    from vime_vllm.aligned.attention import paged

    cache = torch.randn(4, KV_HEADS, PAGE, 2 * DIM, generator=torch.Generator().manual_seed(3))
    apart = KvCache(*(t.clone() for t in (paged(cache).keys, paged(cache).values)))
    query, key, value = tokens(0, HEADS), tokens(1, KV_HEADS), tokens(2, KV_HEADS)
    OPERATIONS.write_kv(key, value, apart, SLOTS)
    spec, batch = AttentionSpec(SCALE, WINDOW, CAP), PagedBatch(START, LENGTHS, TABLE, 3)
    expected = OPERATIONS.attention_paged(query[:4], apart, batch, spec)
    layer, output = implementation(), torch.full((5, HEADS, DIM), 7.0)
    layer.do_kv_cache_update(None, key, value, cache, SLOTS)
    assert layer.forward(None, query, key, value, cache, built(), output) is output
    assert torch.equal(paged(cache).keys, apart.keys)
    assert torch.equal(paged(cache).values, apart.values)
    assert torch.equal(output[:4], expected)
    assert bool((output[4:] == 7).all()), "padding is nobody's"


def test_the_metadata_is_what_the_scheduler_decided() -> None:
    found = built()
    assert found.batch.most_queries == 3
    assert found.batch.query_start is START
    assert found.batch.seq_lens is LENGTHS
    assert found.batch.block_table is TABLE


def test_a_cap_of_zero_is_none() -> None:
    assert implementation(logits_soft_cap=0.0).spec == AttentionSpec(SCALE, WINDOW)
    assert implementation(num_kv_heads=None).num_kv_heads == HEADS


def test_a_forward_without_a_batch_gives_zeros() -> None:
    x, output = tokens(0, HEADS), torch.full((5, HEADS, DIM), torch.nan)
    assert not implementation().forward(None, x, x, x, torch.empty(0), None, output).any()


@pytest.mark.parametrize(("prefix", "causal"), [(1, True), (0, False), (0, torch.tensor([True, False]))])
def test_attention_that_no_contract_defines_is_refused(prefix: int, causal: Any) -> None:
    with pytest.raises(PolicyError, match="cascade or non-causal") as caught:
        built(prefix, causal=causal)
    assert caught.value.code == "VIME-ALIGN-026"


@pytest.mark.parametrize(
    "changes",
    [{"alibi_slopes": [0.5] * HEADS}, {"attn_type": "encoder"}, {"kv_sharing_target_layer_name": "layers.0"}],
)
def test_layers_that_no_contract_defines_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(PolicyError, match="ALiBi, encoder attention or a shared KV cache"):
        implementation(**changes)


@pytest.mark.parametrize("scale", ["output_scale", "output_block_scale"])
def test_a_quantised_output_is_refused(scale: str) -> None:
    x = tokens(0, HEADS)
    with pytest.raises(PolicyError, match="a quantised attention output"):
        implementation().forward(None, x, x, x, torch.empty(0), built(), x, **{scale: torch.ones(1)})
