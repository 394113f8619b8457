"""Wrong kernels for GLM-5, made of the right ones: what a fault puts in their place, on either side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vime_core.numerics.arithmetic import narrow, widen
from vime_glm5.numerics import Glm5Operations
from vime_glm5.numerics.top_k import order_keys

Kernel = Callable[..., Any]


def with_kernels(operations: Glm5Operations, **make: Callable[[Kernel], Kernel]) -> Glm5Operations:
    """The operations with ``make(kernel)`` in the place of kernels, GLM-5's or the dense ones."""
    own = {name: one(getattr(operations.glm, name)) for name, one in make.items() if hasattr(operations.glm, name)}
    dense = {name: one(getattr(operations.kernels, name)) for name, one in make.items() if name not in own}
    return replace(operations, glm=replace(operations.glm, **own), kernels=replace(operations.kernels, **dense))


def last_of_ties_first(_: Kernel) -> Kernel:
    """``top_k``: of equal scores the later index first."""

    def choose(scores: Tensor, visible: Tensor, k: int) -> Tensor:
        result = torch.full((len(scores), k), -1, dtype=torch.int32, device=scores.device)
        for row, end in enumerate(visible.tolist()):
            flipped = order_keys(scores[row, :end].flip(0))
            best = end - 1 - torch.topk(flipped, min(k, end)).indices
            result[row, : len(best)] = best.sort().values.int()
        return result

    return choose


def shifted_at(position: int) -> Callable[[Kernel], Kernel]:
    """``top_k``: one query attends to the key beside its first one."""

    def make(top_k: Kernel) -> Kernel:
        def changed(scores: Tensor, visible: Tensor, k: int) -> Tensor:
            chosen = top_k(scores, visible, k)
            chosen[visible == position + 1, 0] += 1
            return chosen

        return changed

    return make


def unrounded(kernel: Kernel) -> Kernel:
    """``add_rms_norm``: the norm reads the sum before it is rounded, as a fused kernel would."""

    def changed(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if residual is None:
            return kernel(x, residual, weight, eps)
        wide = widen(x) + widen(residual)
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * widen(weight)
        return narrow(normed, x.dtype), narrow(wide, x.dtype)

    return changed


def scaled_twice(add_shared: Kernel) -> Kernel:
    """``add_shared``: the factor of the routed experts is applied once more."""
    return lambda routed, shared, factor: add_shared(routed, shared, factor * factor)


def slots_reversed(route: Kernel) -> Kernel:
    """``route``: experts of a token in the other order."""
    return lambda *arguments: tuple(t.flip(1) for t in route(*arguments))


def last_dims_turned(rope: Kernel) -> Kernel:
    """``rope``: the last dimensions of a head are turned, not the first."""

    def changed(x: Tensor, positions: Tensor, table: Tensor, interleaved: bool, inverse: bool) -> Tensor:
        size = table.shape[1]
        turned = rope(x[..., -size:].contiguous(), positions, table, interleaved, inverse)
        return torch.cat([x[..., :-size], turned], -1)

    return changed


def stale(weight: Tensor) -> Callable[[Kernel], Kernel]:
    """``quantise_weight``: of this weight what it gives now, whatever the weight becomes."""
    place = weight.data_ptr()

    def make(quantise: Kernel) -> Kernel:
        kept = quantise(weight.detach().clone(), 1)
        return lambda master, parts: kept if master.data_ptr() == place else quantise(master, parts)

    return make
