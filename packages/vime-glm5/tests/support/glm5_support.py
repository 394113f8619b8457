"""Bit comparison that fails on NaN and on nothing, inputs by seed, gradients of a definition in fp64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_WIDTHS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8}


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(_WIDTHS[x.dtype]) if x.dtype in _WIDTHS else x


def unequal(a: Tensor, b: Tensor) -> int:
    """How many elements differ in a bit or are NaN."""
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    assert a.numel() > 0, "nothing was compared"
    nan = torch.isnan(a.float()) | torch.isnan(b.float())
    return int(((bits(a) != bits(b)) | nan).sum())


def assert_same(a: Tensor | Sequence[Tensor], b: Tensor | Sequence[Tensor]) -> None:
    pairs = [(a, b)] if isinstance(a, Tensor) else list(zip(a, b, strict=True))
    for left, right in pairs:
        assert unequal(left, right) == 0, f"{unequal(left, right)} of {left.numel()} elements differ"


def normal(seed: int, *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def check_rows(operation: Callable[[Tensor], Tensor], rows: Tensor) -> None:
    """The same bits for a row alone, in another order, among other neighbours, and in any part."""
    whole, middle = operation(rows), len(rows) // 2
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(len(rows)))
    assert_same(operation(rows[order]), whole[order])
    for index in {0, middle, len(rows) - 1}:
        assert_same(operation(rows[index : index + 1]), whole[index : index + 1])
    strangers = rows.flip(0) * 3
    strangers[middle] = rows[middle]
    assert_same(operation(strangers)[middle], whole[middle])
    assert_same(operation(rows[: middle + 1]), whole[: middle + 1])


def gradients(function: Callable[..., Tensor], inputs: Sequence[Tensor], seed: int = 9) -> list[Tensor]:
    """Gradients of the sum of the output times fixed noise."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    noise = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    (out * noise.to(out.dtype)).sum().backward()
    return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]


def check_gradients(
    ours: Callable[..., Any], exact: Callable[..., Any], inputs: Sequence[Tensor], tolerance: float
) -> None:
    """Within ``tolerance`` (relative, Euclidean) of fp64 autograd of the definition, and twice the same bits."""
    first, second = gradients(ours, inputs), gradients(ours, inputs)
    assert_same(first, second)
    for found, wanted in zip(first, gradients(exact, [x.double() for x in inputs]), strict=True):
        error = (found.double() - wanted).norm() / wanted.norm()
        assert wanted.norm() > 0
        assert error < tolerance, float(error)


def e4m3_by_hand(value: float) -> float:
    """The e4m3 number nearest to a finite value, ties to even, from the list of all of them."""
    numbers = [x for x in torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).double().tolist() if x == x]
    distance = min(abs(value - x) for x in numbers)
    nearest = sorted({abs(x) for x in numbers if abs(value - x) == distance})
    if len(nearest) == 1:
        return min((x for x in numbers if abs(value - x) == distance), key=lambda x: (x < 0) != (value < 0))
    even = [x for x in nearest if not int(torch.tensor(x).to(torch.float8_e4m3fn).view(torch.uint8)) & 1]
    return even[0] if value > 0 else -even[0]


def unquantised(contract: Any, provider: str) -> Any:
    """Operations of a contract of GLM-5 without any quantisation, in any dtype: what transformers computes."""
    from dataclasses import replace

    from vime_glm5.numerics import BlockWeight, load_operations

    def hold(weight: Tensor, parts: int) -> BlockWeight:
        rows, columns = -(-(len(weight) // parts) // 128) * parts, -(-weight.shape[1] // 128)
        return BlockWeight(weight.float(), torch.ones(rows, columns), parts)

    def linear(x: Tensor, held: BlockWeight) -> Tensor:
        return torch.nn.functional.linear(x, held.q.to(x.dtype))

    def raw(x: Tensor) -> Tensor:
        return x.float().contiguous().view(torch.uint8)

    def wide(rows: Tensor) -> Tensor:
        return rows.contiguous().view(torch.float32)

    ops = load_operations(contract, provider)
    kernels = replace(
        ops.glm,
        quantise_weight=hold,
        block_linear=linear,
        pack=lambda *given: raw(torch.cat(given[1:], -1)),
        unpack=lambda *given: wide(given[1]),
        index_quantise=lambda x: (x.float(), torch.ones(x.shape[:-1])),
        index_pack=raw,
        index_unpack=lambda rows: (wide(rows), torch.ones(len(rows))),
    )
    return replace(ops, glm=kernels)
