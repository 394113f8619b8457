"""SwiGLU: h = rn(silu(g) * u), silu(g) = g / (1 + exp(-g)) in fp32, one rounding; [g | u] is one tensor (..., 2F).

Gradient, with s = 1 / (1 + exp(-g)):  dg = rn((dh * u) * (s * (1 + g * (1 - s)))),  du = rn(dh * (g * s)).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vime_core.numerics.arithmetic import exp, flush, narrow, widen
from vime_core.numerics.gradients import needs_gradient, record

if TYPE_CHECKING:
    from vime_core.numerics.kernels import Kernels


def reference(gate_up: Tensor) -> Tensor:
    """h (..., F) of [gate | up] (..., 2F)."""
    gate, up = widen(gate_up).chunk(2, -1)
    return narrow(flush(gate / (exp(-gate) + 1.0)) * up, gate_up.dtype)


def reference_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    """The gradient of [gate | up] (..., 2F)."""
    gate, up = widen(gate_up).chunk(2, -1)
    dh, s = widen(grad), flush(torch.reciprocal(exp(-gate) + 1.0))
    pair = ((dh * up) * (s * (gate * (1.0 - s) + 1.0)), dh * (gate * s))
    return narrow(torch.cat(pair, -1), gate_up.dtype)


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernels: Kernels, gate_up: Tensor) -> Tensor:
        ctx.kernels = kernels
        ctx.save_for_backward(gate_up)
        return kernels.swiglu(gate_up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        (grad,) = grads
        (gate_up,) = ctx.saved_tensors
        return None, ctx.kernels.swiglu_backward(grad, gate_up)


def swiglu(kernels: Kernels, gate_up: Tensor) -> Tensor:
    """h (..., F) of gate_up (..., 2F)."""
    if not needs_gradient(gate_up):
        return kernels.swiglu(gate_up)
    return record(_SwiGlu, kernels, gate_up)
