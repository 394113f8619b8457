"""Turning and attending in one step of autograd: the bits of the operations by themselves, whatever the strides."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from numerics_support import DTYPES, assert_same, everyone, normal, unequal
from torch import Tensor

from vime_core.numerics import AttentionSpec, Operations, rope_table

TABLE = rope_table(32, 16, 10000.0)
SPEC = AttentionSpec(0.2)
Heads = tuple[Tensor, Tensor, Tensor]


def heads(tokens: int, groups: int, dtype: torch.dtype) -> Heads:
    """Query, key and value as they lie beside each other in the groups of one projection, each with gradients."""
    mixed = normal(tokens + groups, tokens, groups, 4, 16, dtype=dtype)
    query, key, value = mixed.split([2, 1, 1], 2)
    return tuple(x.requires_grad_() for x in (query.reshape(tokens, -1, 16), key.squeeze(2), value.squeeze(2)))  # pyright: ignore[reportReturnType]


def apart(ops: Operations, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, cu_seqlens: Tensor) -> Tensor:
    q, k = (ops.rope(x.contiguous(), positions, TABLE) for x in (q, k))
    return ops.attention_packed(q, k, v.contiguous(), cu_seqlens, SPEC)[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("lengths", "groups"), [((5, 1, 3), 2), ((4,), 1), ((1,), 3)])
@pytest.mark.parametrize("name", everyone())
def test_bits_are_those_of_the_operations_apart(
    name: str, lengths: tuple[int, ...], groups: int, dtype: torch.dtype
) -> None:
    ops, own = everyone()[name], heads(sum(lengths), groups, dtype)
    positions = torch.cat([torch.arange(length) for length in lengths])
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    seen: dict[str, Tensor] = {}
    output = ops.rotary_attention(*own, positions, TABLE, starts, SPEC, seen.__setitem__)
    want = apart(ops, *own, positions, starts)
    dy = normal(7, *output.shape, dtype=dtype)
    gradients, wanted = (torch.autograd.grad(o, own, dy) for o in (output, want))
    assert_same(output, want)
    assert_same(gradients, wanted)
    turned = tuple(ops.rope(x.detach().contiguous(), positions, TABLE) for x in own[:2])
    assert list(seen) == ["q_rope", "k_rope"]
    assert_same(tuple(seen.values()), turned)
    with torch.no_grad():
        assert_same(ops.rotary_attention(*own, positions, TABLE, starts, SPEC), want)


class TurnedTwice(Operations):
    """A contract's own operations, of which one is defined anew."""

    def rope(self, x: Tensor, positions: Tensor, table: Tensor, interleaved: bool = False) -> Tensor:
        return super().rope(x, 2 * positions, table, interleaved)


class SeenBackwards(Operations):
    """The same with another attention."""

    def attention_packed(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        o, lse = super().attention_packed(q.flip(0), k.flip(0), v.flip(0), cu_seqlens, spec)
        return o.flip(0), lse.flip(0)


@pytest.mark.parametrize("kind", [TurnedTwice, SeenBackwards])
@pytest.mark.parametrize("name", everyone())
def test_operations_that_a_contract_defines_anew_are_those_that_are_joined(name: str, kind: type[Operations]) -> None:
    plain, own = everyone()[name], heads(4, 2, torch.float32)
    ops = kind(**{field.name: getattr(plain, field.name) for field in fields(plain)})
    where = torch.arange(4), torch.tensor([0, 4])
    seen: dict[str, Tensor] = {}
    output, want = (
        ops.rotary_attention(*own, where[0], TABLE, where[1], SPEC, seen.__setitem__),
        apart(ops, *own, *where),
    )
    assert_same(output, want)
    assert_same(seen["k_rope"], ops.rope(own[1].contiguous(), where[0], TABLE))
    dy = normal(7, *output.shape, dtype=torch.float32)
    assert_same(torch.autograd.grad(output, own, dy), torch.autograd.grad(want, own, dy))
    assert unequal(output, plain.rotary_attention(*own, where[0], TABLE, where[1], SPEC)) > 0


@pytest.mark.parametrize(("tokens", "groups"), [(5, 2), (4, 1), (1, 3), (1, 1)])
def test_attention_is_given_the_strides_of_new_tensors(tokens: int, groups: int) -> None:
    """An axis of one token or head may have any, which an offered kernel that copies blocks cannot read."""
    ops, own = everyone()["reference"], heads(tokens, groups, torch.float32)
    strides: list[tuple[int, ...]] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        strides.extend(x.stride() for x in (q, k, v))
        return ops.kernels.attention_packed(q, k, v, *rest)

    watched = replace(ops, kernels=replace(ops.kernels, attention_packed=attend))
    watched.rotary_attention(*own, torch.arange(tokens), TABLE, torch.tensor([0, tokens]), SPEC)
    assert strides == [torch.empty(x.shape).stride() for x in own]


@pytest.mark.parametrize("asked", range(3))
def test_one_that_alone_has_a_gradient_has_the_same(asked: int) -> None:
    ops, own, where = everyone()["reference"], heads(6, 2, torch.float32), (torch.arange(6), TABLE)
    starts, dy = torch.tensor([0, 6]), normal(7, 6, 4, 16)
    want = torch.autograd.grad(ops.rotary_attention(*own, *where, starts, SPEC), own, dy)[asked]
    alone = [x.detach().requires_grad_(number == asked) for number, x in enumerate(own)]
    output = ops.rotary_attention(alone[0], alone[1], alone[2], *where, starts, SPEC)
    assert_same(torch.autograd.grad(output, alone[asked], dy), (want,))


def test_a_comparison_sees_what_is_not_turned_back() -> None:
    ops, own = everyone()["reference"], heads(6, 2, torch.float32)
    positions, starts = torch.arange(6), torch.tensor([0, 6])
    turned = [ops.rope(x.detach().contiguous(), positions, TABLE).requires_grad_() for x in own[:2]]
    value = own[2].detach().contiguous().requires_grad_()
    output = ops.attention_packed(*turned, value, starts, SPEC)[0]
    dy = normal(7, *output.shape)
    left_turned = torch.autograd.grad(output, (*turned, value), dy)
    gradients = torch.autograd.grad(ops.rotary_attention(*own, positions, TABLE, starts, SPEC), own, dy)
    assert [unequal(a, b) > 0 for a, b in zip(gradients, left_turned, strict=True)] == [True, True, False]
