"""The one exception to stock vLLM, on the CPU only: linear layers compute from the weight that one can read.

Stock vLLM on a CPU packs the weight of a linear layer for its kernel and drops the original (the packed copy of a
tied output layer stays beside the original); nobody outside the kernel can then say which weights it reads, and a
digest of ``layer.weight`` would prove nothing. Here every linear layer calls ``torch.nn.functional.linear`` on
``layer.weight`` itself.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

PLAIN_LINEAR: Final = "cpu-plain-linear"
"""Name of the exception in the run record."""


def plain_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """y = x weight^T + bias as torch computes it, in the dtype of x."""
    return torch.nn.functional.linear(x, weight, bias)


def keep_weight(layer: Any, remove_weight: bool = False) -> None:
    """In the place of vLLM's packing: choose the plain linear and leave ``layer.weight`` where it is."""
    del remove_weight
    if layer.weight.ndim == 2:
        layer.cpu_linear = plain_linear
