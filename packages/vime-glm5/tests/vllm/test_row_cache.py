"""Pages of rows: where vLLM lays them out, and that a request reads its own pages only."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from glm5_support import assert_same

from vime_glm5.vllm.cache import Request, RowBackend, RowCache

PAGE, WIDTH, PAGES = 4, 12, 6


def cache() -> RowCache:
    context = SimpleNamespace(static_forward_context={})
    made = RowCache(SimpleNamespace(compilation_config=context), "model.layers.0.cache", WIDTH)
    made.bind_kv_cache(torch.full(RowBackend.get_kv_cache_shape(PAGES, PAGE, 1, WIDTH), 255, dtype=torch.uint8))
    return made


def rows(count: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 255, (count, WIDTH), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_the_layout_that_0_26_asks_for_has_a_page_outermost_and_every_byte_of_a_row() -> None:
    assert RowBackend.get_kv_cache_shape(PAGES, PAGE, 1, WIDTH) == (PAGES, 1, PAGE, WIDTH)


def test_a_request_reads_what_it_wrote_and_no_foreign_page() -> None:
    held, written = cache(), rows(6, 1)
    table = torch.tensor([5, 2])
    at = torch.arange(6)
    slots = table[at // PAGE] * PAGE + at % PAGE
    held.write(torch.cat([written, rows(1, 2)]), torch.cat([slots, torch.tensor([-1])]))
    request = Request(0, 6, 6, table)
    assert_same(held.read(request, torch.tensor([5, 0, 3])), written[[5, 0, 3]])
    for page in {0, 1, 3, 4}:
        held.kv_cache[page] = 7
    assert_same(held.read(request, at), written)
    held.kv_cache[2] = 7
    assert not torch.equal(held.read(request, at), written)


def test_the_page_size_is_the_tensors() -> None:
    """vLLM may settle it after the model was built."""
    held, written = cache(), rows(2, 3)
    held.bind_kv_cache(torch.zeros(RowBackend.get_kv_cache_shape(PAGES, 2 * PAGE, 1, WIDTH), dtype=torch.uint8))
    held.write(written, torch.tensor([7, 8]))
    assert_same(held.kv_cache[0, 0, 7], written[0])
    assert_same(held.kv_cache[1, 0, 0], written[1])
