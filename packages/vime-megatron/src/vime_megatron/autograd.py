"""torch's loosely typed ``Function.apply``, typed once."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor


def apply(function: type[torch.autograd.Function], *arguments: object) -> Tensor:
    """``function.apply(*arguments)`` of a function that returns one tensor."""
    return cast("Any", function).apply(*arguments)
