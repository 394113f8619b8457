"""Offered kernels: taken call by call where their bits are the provider's, named and left where they are not."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from numerics_support import assert_same, cpu, normal
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from vime_core.errors import BackendError, ContractViolation, PolicyError
from vime_core.numerics import AttentionSpec, KvCache, Operations, PagedBatch, chosen_linear
from vime_core.numerics.chosen_attention import with_attention
from vime_core.numerics.chosen_linear import (
    TOKENS,
    ChosenLinear,
    comparison_bytes,
    differences,
    product_of,
    with_linear,
)
from vime_core.numerics.offers import AttentionOffer, LinearCall, LinearOffer, Pass

CPU = torch.device("cpu")
N, K = 24, 40
FORWARD = LinearCall("forward", N, K, wide=False)
DX = LinearCall("input gradient", N, K, wide=False)
DW = LinearCall("weight gradient", N, K, wide=False)
Spoil = Callable[[LinearCall, Tensor, Tensor], Tensor]


def toy(call: LinearCall, left: Tensor, right: Tensor) -> Tensor:
    """The provider's own product, from operands as an offer gets them."""
    x, w = {
        "forward": (left, right),
        "input gradient": (left, right.t()),
        "weight gradient": (left.t(), right.t()),
    }[call.of]
    return cpu().kernels.linear(x, w, None, 1, call.wide)


class Shelf:
    """An offer that counts what is asked of it; ``spoil`` changes its results."""

    def __init__(self, spoil: Spoil | None = None, tokens: tuple[int, ...] = (1, 64, 300)) -> None:
        self.ran: list[tuple[LinearCall, int]] = []
        self.prepared: list[LinearCall] = []
        self.spoil = spoil or (lambda _call, _left, y: y)
        self.offer = LinearOffer(
            "toy", "1", lambda call: call.n % 8 == 0, lambda _call: tokens, self.prepared.extend, self.run
        )

    def run(self, call: LinearCall, left: Tensor, right: Tensor) -> Tensor:
        self.ran.append((call, len(left)))
        return self.spoil(call, left, toy(call, left, right))

    def operations(self, *, required: bool = False) -> Operations:
        # The own kernel's one chain over K, as on a GPU.
        own = replace(cpu().kernels, chunk_count=lambda *_: 1)
        return replace(cpu(), kernels=with_linear(own, self.offer, required=required))


def bf16(seed: int, *shape: int) -> Tensor:
    return normal(seed, *shape, dtype=torch.bfloat16)


def next_bit(y: Tensor, row: int = -1) -> Tensor:
    """One element of one row moved by one ulp."""
    bits = y.clone().view(torch.int16 if y.dtype == torch.bfloat16 else torch.int32)
    bits[row, 3] += 1
    return bits.view(y.dtype)


def bits_moved(y: Tensor) -> Tensor:
    """Some elements moved by one ulp, so that their number tells which values were drawn."""
    return torch.where(y > 100, (y.view(torch.int16) + 1).view(y.dtype), y)


def test_equal_kernels_serve_forward_and_both_gradients() -> None:
    shelf = Shelf()
    ops, own = shelf.operations(), replace(cpu(), kernels=replace(cpu().kernels, chunk_count=lambda *_: 1))
    results: list[list[Tensor]] = []
    for operations in (ops, own):
        x, w = bf16(1, 5, K).requires_grad_(), bf16(2, N, K).requires_grad_()
        y = operations.linear(x, w)
        y.backward(bf16(3, 5, N))
        assert x.grad is not None
        assert w.grad is not None
        results.append([y.detach(), x.grad, w.grad])
    for left, right in zip(*results, strict=True):
        assert_same(left, right)
    assert ops.kernels.choices()["forward 24x40"] == "toy"
    assert ops.kernels.choices()["input gradient 24x40"] == "toy"
    assert ops.kernels.choices()["weight gradient 24x40"] == "toy"
    assert (FORWARD, 5) in shelf.ran
    assert (DX, 5) in shelf.ran


def test_what_is_compared_are_the_offers_tokens_and_the_usual_ones() -> None:
    shelf = Shelf(tokens=(7, 257))
    shelf.operations().linear(bf16(1, 5, K), bf16(2, N, K))
    assert [m for _, m in shelf.ran] == [*sorted({7, *(m for m in TOKENS if m <= 257)}, reverse=True), 5]
    assert shelf.prepared == [FORWARD]


class LiveBytes(TorchDispatchMode):
    """The most bytes of tensors that were made under it and lived at once."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, (list, tuple)) else (found,):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage())._cdata not in self.live:
                self.live[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.live.pop, storage._cdata)
        self.most = max(self.most, sum(self.live.values()))
        return found


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("of", ["forward", "input gradient", "weight gradient"])
def test_a_comparison_holds_no_more_memory_than_it_says(of: Pass, wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chosen_linear, "_SLAB", 1000)
    call, shelf = LinearCall(of, 200, 120, wide), Shelf(tokens=(1, 300))
    with LiveBytes() as live:
        assert not differences(cpu().kernels.linear, shelf.offer, call, CPU)
    most = comparison_bytes(call, 300)
    assert most / 2 < live.most <= most


def test_a_comparison_without_memory_says_so_and_what_it_needs() -> None:
    def full(_call: LinearCall, _left: Tensor, _y: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")

    ops = Shelf(full).operations()
    with pytest.raises(BackendError, match=r"comparing toy .* forward 24x40 ran out of GPU memory; it needs 0\.2 GiB"):
        ops.linear(bf16(1, 2, K), bf16(2, N, K))
    assert ops.kernels.choices() == {}


@pytest.mark.parametrize("tokens", [1, 17, 64, 300])
def test_one_other_bit_at_one_number_of_tokens_keeps_the_own_kernel_and_is_named(tokens: int) -> None:
    shelf = Shelf(lambda _call, left, y: next_bit(y) if len(left) == tokens else y)
    ops, x, w = shelf.operations(), bf16(1, tokens, K), bf16(2, N, K)
    assert_same(ops.linear(x, w), cpu().kernels.linear(x, w, None, 1, False))
    assert ops.kernels.choices() == {"forward 24x40": f"own (toy differs at M = {tokens}: 1 elements)"}


def test_an_own_kernel_with_other_bits_for_few_rows_is_what_few_rows_are_compared_with() -> None:
    def own(x: Tensor, *rest: Any) -> Tensor:
        y = cpu().kernels.linear(x, *rest)
        return next_bit(y) if len(x) == 1 else y

    ops = replace(cpu(), kernels=with_linear(replace(cpu().kernels, linear=own), Shelf().offer, required=False))
    ops.kernels.settle([FORWARD], CPU)
    assert ops.kernels.choices() == {"forward 24x40": "own (toy differs at M = 1: 1 elements)"}


def test_values_as_large_as_a_models_largest_are_compared() -> None:
    def saturates(call: LinearCall, left: Tensor, right: Tensor) -> Tensor:
        return toy(call, left.clamp(-20, 20), right)

    shelf = Shelf()
    offer = replace(shelf.offer, run=saturates)
    ops = replace(cpu(), kernels=with_linear(cpu().kernels, offer, required=False))
    ops.kernels.settle([replace(FORWARD, k=800)], CPU)
    assert ops.kernels.choices()["forward 24x800"].startswith("own (toy differs at M = 1, 2, 3, 16")


@pytest.mark.parametrize("call", [FORWARD, DX, DW], ids=str)
def test_each_product_of_a_weight_is_compared_by_itself(call: LinearCall) -> None:
    shelf = Shelf(lambda asked, _left, y: next_bit(y) if asked == call else y)
    ops = shelf.operations()
    ops.kernels.settle([FORWARD], CPU)
    ops.kernels.settle_gradients(CPU)
    chosen = ops.kernels.choices()
    assert set(chosen) == {str(FORWARD), str(DX), str(DW)}
    assert {name: kernels == "toy" for name, kernels in chosen.items()} == {name: name != str(call) for name in chosen}


@pytest.mark.parametrize(
    "spoil", [lambda _c, _x, y: y * float("nan"), lambda _c, _x, y: y.float(), lambda _c, _x, y: y[:-1]]
)
def test_nan_another_dtype_and_another_shape_are_no_agreement(spoil: Spoil) -> None:
    ops = Shelf(spoil).operations()
    assert ops.linear(bf16(1, 2, K), bf16(2, N, K)).isfinite().all()
    assert ops.kernels.choices()["forward 24x40"].startswith("own (toy differs at M = 1, 2, 3")


def test_what_is_found_does_not_hang_on_the_default_dtype() -> None:
    """As vLLM sets it while it builds a model, and the trainer does not."""
    found: list[dict[str, str]] = []
    for dtype in (torch.float32, torch.bfloat16):
        ops = Shelf(lambda _call, _left, y: bits_moved(y)).operations()
        torch.set_default_dtype(dtype)
        try:
            ops.kernels.settle([replace(FORWARD, k=2000)], CPU)
        finally:
            torch.set_default_dtype(torch.float32)
        found.append(dict(ops.kernels.choices()))
    assert found[0] == found[1]
    assert "differs" in found[0]["forward 24x2000"]


def test_an_offer_without_a_number_of_tokens_compared_nothing_and_serves_nothing() -> None:
    ops = Shelf(tokens=()).operations()
    ops.linear(bf16(1, 2, K), bf16(2, N, K))
    assert ops.kernels.choices() == {"forward 24x40": "own (nothing compared)"}


def test_required_kernels_with_another_bit_are_refused_by_name() -> None:
    ops = Shelf(lambda _call, _left, y: next_bit(y)).operations(required=True)
    with pytest.raises(
        ContractViolation, match=r"alignment.linear = 'toy' cannot serve the forward 24x40: toy differs"
    ):
        ops.linear(bf16(1, 2, K), bf16(2, N, K))


def test_what_an_offer_has_no_kernel_for_is_the_providers() -> None:
    shelf = Shelf()
    ops = shelf.operations()
    ops.linear(bf16(1, 2, K), bf16(2, 9, K))
    ops.linear(bf16(1, 2, K), bf16(2, N, K), bf16(3, N))
    ops.linear(normal(1, 2, K), normal(2, N, K))
    assert shelf.ran == []
    assert ops.kernels.choices() == {
        "forward 9x40": "own (toy has no kernel)",
        "forward 24x40 with bias": "own (it adds the bias before it rounds)",
    }
    ops.kernels.settle_gradients(CPU)
    assert ops.kernels.choices()["input gradient 24x40"] == "toy"


def test_each_product_is_told_by_how_its_operands_are_stored() -> None:
    x, w, dy = bf16(1, 5, K), bf16(2, N, K), bf16(3, 5, N)
    for given, product in {
        (x, w): ("forward", N, K),
        (x.view(5, 1, K), w): ("forward", N, K),
        (dy, w.t()): ("input gradient", N, K),
        (dy.view(1, 5, N), w.t()): ("input gradient", N, K),
        (dy.t(), x.t()): ("weight gradient", N, K),
        (dy.t(), bf16(1, K, 5)): None,
        (x.float(), w.float()): None,
        (x, w.float()): None,
        (x[:0], w): None,
        (x, w[:0]): None,
    }.items():
        assert product_of(*given) == product


def test_while_a_graph_is_captured_nothing_is_built_and_nothing_is_held_as_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shelf = Shelf()
    chosen: Any = shelf.operations().kernels.linear
    key, captures = (("forward", N, K), False, False), [True]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures[0])
    assert chosen._serve(key, torch.device("cuda")) is None
    assert chosen.settled == {}
    assert shelf.prepared == []
    chosen.settle([FORWARD], CPU)
    assert chosen._serve(key, torch.device("cuda")) == FORWARD, "what was settled before serves a capture"


def test_a_capture_does_not_settle_what_comes_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    shelf, captures = Shelf(), [True]
    monkeypatch.setattr(chosen_linear, "_captures", lambda _: captures[0])
    ops, x, w = shelf.operations(), bf16(1, 5, K), bf16(2, N, K)
    ops.linear(x, w)
    assert shelf.ran == []
    captures[0] = False
    ops.linear(x, w)
    assert shelf.ran[-1] == (FORWARD, 5)


@pytest.mark.parametrize("first", [False, True])
def test_a_product_in_fp32_is_a_call_of_its_own(first: bool) -> None:
    shelf = Shelf()
    ops, x, w = shelf.operations(), bf16(1, 5, K), bf16(2, N, K)
    for wide in (first, not first):
        assert_same(ops.kernels.linear(x, w, None, 1, wide), cpu().kernels.linear(x, w, None, 1, wide))
        assert shelf.ran[-1] == (replace(FORWARD, wide=wide), 5)
    assert set(ops.kernels.choices()) == {str(FORWARD), str(replace(FORWARD, wide=True))}


@pytest.mark.parametrize("served", [True, False])
def test_a_settled_call_is_looked_up_once(served: bool) -> None:
    shelf = Shelf(None if served else lambda _call, _left, y: next_bit(y))
    ops, x, w = shelf.operations(), bf16(1, 5, K), bf16(2, N, K)
    want, chosen = ops.linear(x, w), ops.kernels.linear
    assert isinstance(chosen, ChosenLinear)
    chosen.settled.clear()  # asked again, it would be settled anew
    before = len(shelf.ran)
    assert_same(ops.linear(x, w), want)
    assert len(shelf.ran) - before == served
    assert chosen.settled == {}


def test_a_product_that_does_not_pay_is_the_providers_but_in_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    shelf, captures = Shelf(), [False]
    monkeypatch.setattr(chosen_linear, "_captures", lambda _: captures[0])
    offer = replace(shelf.offer, pays=lambda call, tokens: (call.of, tokens) == ("forward", 6))
    ops = replace(cpu(), kernels=with_linear(cpu().kernels, offer, required=True))
    ops.kernels.settle([FORWARD], CPU)
    shelf.ran.clear()
    for rows, capture, served in ((5, False, False), (6, False, True), (5, True, True)):
        captures[0] = capture
        x, w = bf16(1, rows, K), bf16(2, N, K)
        assert_same(ops.linear(x, w), cpu().linear(x, w))
        assert shelf.ran == [(FORWARD, rows)] * served
        shelf.ran.clear()
    assert ops.kernels.choices() == {str(FORWARD): "toy"}


@pytest.mark.parametrize(("width", "first"), [(K + 1, 0), (K + 8, 1)], ids=["stride", "address"])
@pytest.mark.parametrize("whose", ["x", "weight"])
def test_rows_that_the_copy_engine_cannot_read_are_the_providers(whose: str, width: int, first: int) -> None:
    def placed(rows: int, wrong: bool) -> Tensor:
        if not wrong:
            return bf16(1, rows, K)
        return bf16(2, rows * width + first).as_strided((rows, K), (width, 1), first)

    shelf, x, w = Shelf(), placed(4, whose == "x"), placed(N, whose == "weight")
    assert_same(shelf.operations().linear(x, w), cpu().kernels.linear(x, w, None, 1, False))
    assert shelf.ran == []


def test_a_product_has_the_shape_of_its_rows() -> None:
    shelf, x, w, dy = Shelf(), bf16(1, 2, 3, K), bf16(2, N, K), bf16(3, 2, 3, N)
    linear = shelf.operations().kernels.linear
    for rows, matrix in ((x, w), (dy, w.t())):
        assert_same(linear(rows, matrix, None, 1, False), cpu().kernels.linear(rows, matrix, None, 1, False))
        assert shelf.ran[-1][1] == 6


def offered_attention(seen: list[str]) -> AttentionOffer:
    def packed(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
        seen.append("packed")
        return cpu().kernels.attention_packed(q, k, v, starts, spec)

    def paged(q: Tensor, cache: KvCache, batch: PagedBatch, spec: AttentionSpec, o: Tensor) -> None:
        seen.append("paged")
        cpu().kernels.attention_paged(q, cache, batch, spec, o)

    def covers(size: int, dtype: torch.dtype, spec: AttentionSpec) -> bool:
        return size == 16 and dtype == torch.bfloat16 and spec.window is None

    return AttentionOffer("toy", "1", covers, packed, paged)


@pytest.mark.parametrize(("size", "window", "served"), [(16, None, True), (8, None, False), (16, 4, False)])
def test_an_offered_attention_serves_both_entries_of_the_structures_that_it_covers(
    size: int, window: int | None, served: bool
) -> None:
    seen: list[str] = []
    kernels = with_attention(cpu().kernels, offered_attention(seen), required=False)
    q, spec = bf16(1, 5, 2, size), AttentionSpec(0.25, window)
    kernels.attention_packed(q, q, q, torch.tensor([0, 5]), spec)
    pages, o = bf16(2, 1, 2, 8, size), torch.zeros_like(q)
    batch = PagedBatch(torch.tensor([0, 5]), torch.tensor([5]), torch.tensor([[0]]))
    kernels.attention_paged(q, KvCache(pages, pages), batch, spec, o)
    assert bool(o.any(-1).all())
    assert seen == (["packed", "paged"] if served else [])
    (name, chosen), *others = kernels.choices().items()
    assert not others
    assert name.startswith(f"attention of head size {size} in bfloat16")
    assert chosen == ("toy" if served else "own (toy has no proven kernel)")


def test_a_required_attention_refuses_other_structures() -> None:
    kernels = with_attention(cpu().kernels, offered_attention([]), required=True)
    q = bf16(1, 5, 2, 8)
    with pytest.raises(PolicyError, match=r"'toy' has no proven kernel for the attention of head size 8 in bfloat16"):
        kernels.attention_packed(q, q, q, torch.tensor([0, 5]), AttentionSpec(0.25))
