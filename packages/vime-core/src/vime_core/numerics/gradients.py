"""What every differentiable entry asks of autograd, behind types: whether to record, and recording."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Whether autograd records an operation on these; the plain kernel call is several microseconds cheaper."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def record(function: type[torch.autograd.Function], *arguments: object) -> Any:
    """Runs ``function`` so that autograd can go back through it.

    By the ``apply`` below `torch.autograd.Function`'s own, which looks first for transforms of `torch.func`: here are
    none, and the look takes longer than the rest of the call.
    """
    inner: Any = super(torch.autograd.Function, function)
    return inner.apply(*arguments)
