"""DeepGEMM and FlashAttention 3 on a Hopper GPU, beside the provider's own kernels. Nothing of it runs without one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vime_core.numerics import AttentionSpec, KvCache, Operations, PagedBatch, load_provider
from vime_core.numerics.offers import AttentionOffer, LinearCall, LinearOffer, Offers
from vime_vllm.kernels import deep_gemm, fa3

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no GPU of capability 9.0"
)
SHAPES = ((1536, 576), (576, 1536), (49152, 576))
LAYOUTS = ((64, 9, 3), (64, 14, 2), (128, 8, 2))
LENGTH = 700


def unequal(a: Tensor, b: Tensor) -> int:
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    assert a.numel()
    bits = torch.int16 if a.dtype == torch.bfloat16 else torch.int32
    return int(((a.contiguous().view(bits) != b.contiguous().view(bits)) | a.isnan() | b.isnan()).sum())


def normal(seed: int, *shape: int) -> Tensor:
    made = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=made, device="cuda").bfloat16()


@pytest.fixture(scope="module")
def offered() -> Operations:
    linear, attention = deep_gemm.offer(), fa3.offer()
    assert isinstance(linear, LinearOffer), linear
    assert isinstance(attention, AttentionOffer), attention
    found = load_provider("cuda", Offers(linear, attention))
    device = torch.device("cuda")
    found.kernels.settle([LinearCall("forward", n, k, wide=False) for n, k in SHAPES], device)
    found.kernels.settle_gradients(device)
    found.kernels.settle([LinearCall("weight gradient", n, k, wide=True) for n, k in SHAPES], device)
    return found


def test_deepgemm_serves_every_product_of_every_weight(offered: Operations) -> None:
    chosen = {call: kernels for call, kernels in offered.kernels.choices().items() if not call.startswith("attention")}
    assert len(chosen) == 12
    assert set(chosen.values()) == {"deepgemm"}
    assert offered.digest != load_provider("cuda").digest


@pytest.mark.parametrize("tokens", [1, 5, 33, 300, 777, 1500, 9001])
def test_numbers_of_tokens_that_no_probe_tried_have_the_own_bits_too(offered: Operations, tokens: int) -> None:
    own = load_provider("cuda")
    for n, k in SHAPES[:2]:
        x, w, dy = normal(1, tokens, k), normal(2, n, k), normal(3, tokens, n)
        assert unequal(offered.linear(x, w), own.linear(x, w)) == 0
        for a, b, wide in ((dy, w.t(), False), (dy.t(), x.t(), False), (dy.t(), x.t(), True)):
            found, want = (o.kernels.linear(a, b, None, 1, wide) for o in (offered, own))
            assert unequal(found, want) == 0


def test_a_captured_product_has_the_same_bits(offered: Operations) -> None:
    x, w = normal(1, 24, 576), normal(2, 1536, 576)
    want, graph = offered.linear(x, w), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = offered.linear(x, w)
    graph.replay()
    assert unequal(y, want) == 0


def pages(k: Tensor, v: Tensor, size: int) -> tuple[KvCache, Tensor]:
    """Keys and values in shuffled pages as the engine keeps them, and the table of the one sequence."""
    count, heads, dim = -(-len(k) // size), k.shape[1], k.shape[2]
    both = torch.full((count + 2, heads, 2 * size, dim), 7.0, dtype=k.dtype, device=k.device)
    keys, values = both.chunk(2, 2)
    table = torch.randperm(count + 2, generator=torch.Generator().manual_seed(size))[:count].to("cuda", torch.int32)
    index = torch.arange(len(k), device=k.device)
    keys[table[index // size].long(), :, index % size] = k
    values[table[index // size].long(), :, index % size] = v
    return KvCache(keys, values), table


def ask(operations: Operations, q: Tensor, cache: KvCache, table: Tensor, parts: list[tuple[int, int]]) -> Tensor:
    """Queries [a, b) of the one sequence for every part, as one batch of requests; beside them lies NaN, where a model
    has keys and values."""
    starts = torch.tensor([0, *(b - a for a, b in parts)], device="cuda").cumsum(0).int()
    lengths = torch.tensor([b for _, b in parts], dtype=torch.int32, device="cuda")
    batch = PagedBatch(starts, lengths, table.expand(len(parts), -1).contiguous(), max(b - a for a, b in parts))
    asked = torch.cat([q[a:b] for a, b in parts])
    projected = torch.cat([asked, torch.full_like(asked[:, :2], torch.nan)], 1)
    return operations.attention_paged(
        projected[:, : q.shape[1]], cache, batch, AttentionSpec(q.shape[-1] ** -0.5), torch.empty_like(asked)
    )


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("page", [16, 64, 128])
def test_fa3_gives_a_query_the_same_bits_in_every_phase(
    offered: Operations, layout: tuple[int, int, int], page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, heads, kv_heads = layout
    q, k, v = (normal(i, LENGTH, h, size) for i, h in enumerate((heads, kv_heads, kv_heads)))
    whole, _ = offered.attention_packed(
        q, k, v, torch.tensor([0, LENGTH], dtype=torch.int32, device="cuda"), AttentionSpec(size**-0.5)
    )
    cache, table = pages(k, v, page)
    decode = [(i, i + 1) for i in range(LENGTH)]
    for parts in ([(0, LENGTH)], [(0, 7), (7, 400), (400, LENGTH)], decode, [(600, LENGTH), *decode[:600]]):
        want = torch.cat([whole[a:b] for a, b in parts])
        assert unequal(ask(offered, q, cache, table, parts), want) == 0, len(parts)
    if size == 64:  # without the bound another tile serves decode, and the comparison notices
        monkeypatch.setattr(fa3, "LEAST_BOUND", 1)
        assert unequal(ask(offered, q, cache, table, decode), whole) > 0


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_padding_of_a_decode_graph_is_not_written_and_reaches_no_token(
    offered: Operations, layout: tuple[int, int, int]
) -> None:
    """Queries as they lie beside keys and values in a projection; padded to 8 requests, the padding's rows hold NaN."""
    size, heads, kv_heads = layout
    q, k, v = (normal(i, LENGTH, h, size) for i, h in enumerate((heads, kv_heads, kv_heads)))
    cache, table = pages(k, v, 16)
    at = [3, 64, 127, 128, LENGTH - 1]
    want = ask(offered, q, cache, table, [(i, i + 1) for i in at])
    projected = torch.full((8, heads + 2 * kv_heads, size), torch.nan, dtype=q.dtype, device="cuda")
    projected[:5, :heads] = q[at]
    starts = torch.tensor([0, 1, 2, 3, 4, 5, 5, 5, 5], dtype=torch.int32, device="cuda")
    lengths = torch.tensor([*(i + 1 for i in at), 0, 0, 0], dtype=torch.int32, device="cuda")
    batch = PagedBatch(starts, lengths, table.expand(8, -1).contiguous(), 1)
    for operations, exact in ((offered, want), (load_provider("cuda"), None)):
        o = torch.full((8, heads, size), 7.0, dtype=q.dtype, device="cuda")
        operations.attention_paged(projected[:, :heads], cache, batch, AttentionSpec(size**-0.5), o)
        assert exact is None or unequal(o[:5], exact) == 0
        assert bool((o[5:] == 7).all())
        assert not bool(o.isnan().any())
    x, w = normal(3, 8, 576), normal(4, 1536, 576)
    whole = offered.linear(x, w)
    assert (
        unequal(
            offered.linear(x.masked_fill((torch.arange(8, device="cuda") > 4)[:, None], torch.nan), w)[:5], whole[:5]
        )
        == 0
    )


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_fa3_and_its_gradient_compute_attention(offered: Operations, layout: tuple[int, int, int]) -> None:
    size, heads, kv_heads = layout
    tensors = [normal(i, LENGTH, h, size).requires_grad_() for i, h in enumerate((heads, kv_heads, kv_heads))]
    starts = torch.tensor([0, 2, 2, 300, LENGTH], dtype=torch.int32, device="cuda")
    own, results = load_provider("cuda"), []
    for operations in (offered, own):
        y, lse = operations.attention_packed(*tensors, starts, AttentionSpec(size**-0.5))
        results.append([y, lse, *torch.autograd.grad(y, tensors, normal(9, LENGTH, heads, size))])
    for found, want in zip(*results, strict=True):
        assert found.shape == want.shape
        assert float((found.float() - want.float()).norm() / want.float().norm()) < 0.01
    assert unequal(results[0][0], results[1][0]) > 0
    assert any(kernels == "fa3" for kernels in offered.kernels.choices().values())
