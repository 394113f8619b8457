"""Everything that Megatron-core assumes about CUDA, for machines without it. With CUDA nothing here does anything.

Megatron allocates buffers on ``torch.cuda.current_device()`` or ``device="cuda"``, tells dtypes by the names of CUDA
tensor types, and asks for streams. Within `cuda_bridge` those calls get the CPU; outside, torch is untouched.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


def device() -> torch.device:
    """The device that this process trains on."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else CPU


def backend() -> str:
    """The collective backend of that device."""
    return "nccl" if torch.cuda.is_available() else "gloo"


@contextmanager
def cuda_bridge() -> Generator[None]:
    """Run calls of Megatron that assume CUDA."""
    if torch.cuda.is_available():
        yield
        return
    with ExitStack() as stack:
        for name, stand_in in _CUDA_FUNCTIONS.items():
            stack.enter_context(patch.object(torch.cuda, name, stand_in))
        stack.enter_context(_CudaMeansCpu())
        yield


def _current_device() -> torch.device:
    return CPU


def _nothing(*_: object, **__: object) -> None:
    return None


_CUDA_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "current_device": _current_device,
    "current_stream": _nothing,  # gradient reduction looks it up and uses it only with CUDA graphs
    "synchronize": _nothing,
    "empty_cache": _nothing,
}


class _CudaMeansCpu(TorchFunctionMode):
    """Redirects ``device="cuda"`` and ``Tensor.cuda()``, and names tensor types as CUDA tensors have them."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not named:
            return str(func(*args)).replace("torch.", "torch.cuda.", 1)
        if str(named.get("device")).startswith("cuda"):
            named["device"] = CPU
        return func(*args, **named)
