"""Launches of Triton kernels that remember what was compiled for them.

Triton finds the compiled kernel anew for every launch, in 20 to 30 us of Python, and a small model's train step waits
for that a thousand times. Here the first launch with arguments of one kind is Triton's own, and further ones call what
it compiled. A kind is at least as fine as what Triton compiles for: dtype and alignment of every pointer, whether an
int is 1, a multiple of 16 or large, block shapes of descriptors, all constants and options, and the device.

While anybody watches launches or compilation by Triton's hooks, every launch is Triton's own. Its check that a kernel's
global constants are what they were when it was compiled is made at the first launch of a kind only.
"""

# Triton's language has no types.
# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

_INT32_END = 1 << 31
_MISPLACED = "misplaced"
UNFUSED = {"enable_fp_fusion": False}
"""An option of kernels that round every product and every sum: which of two products a compiler fuses with their sum
follows from constants and alignment, so that queries turned alone and beside keys would have other bits."""


def remembered(function: Any) -> Any:
    """``function`` of ``triton.jit``, launched as before; in Triton's interpreter, where nothing is compiled, itself.

    Raises:
        TypeError: a parameter that is no constant comes after one that is.
    """
    return Remembered(function) if isinstance(function, JITFunction) else function


class Remembered:
    """A kernel to be called as ``kernel[grid](*arguments, **constants_and_options)``; see the module."""

    def __init__(self, function: JITFunction) -> None:
        constant = [parameter.is_constexpr for parameter in function.params]
        self.function = function
        self.compiled: dict[Hashable, tuple[CompiledKernel, tuple[Any, ...]]] = {}
        self._varying = len(constant) - sum(constant)
        if any(constant[: self._varying]):
            raise TypeError(f"the constants of {function.__name__} are not its last parameters")

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], /, *arguments: Any, **options: Any) -> None:
        active: Any = driver.active
        device = active.get_current_device()
        kind, passed = kind_of(arguments, options, device)
        if kind is None or _watched(self.function):
            self.function[grid](*arguments, **options)
            return
        found = self.compiled.get(kind)
        if found is None:
            self._remember(kind, self.function[grid](*arguments, **options), arguments, options)
            return
        kernel, constants = found
        run: Any = kernel.run
        run(
            grid[0], grid[1] if len(grid) > 1 else 1, grid[2] if len(grid) > 2 else 1,
            active.get_current_stream(device), kernel.function, kernel.packed_metadata, None, None, None,
            *passed, *constants,
        )  # fmt: skip

    def _remember(self, kind: Hashable, kernel: Any, arguments: Sequence[Any], options: Mapping[str, Any]) -> None:
        """Unless an argument was given otherwise than in its place, or Triton did not compile (yet)."""
        varying, constants = self.function.params[: self._varying], self.function.params[self._varying :]
        in_place = len(arguments) == len(varying) and not any(parameter.name in options for parameter in varying)
        if in_place and isinstance(kernel, CompiledKernel):
            self.compiled[kind] = kernel, tuple(options.get(p.name, p.default) for p in constants)


def kind_of(arguments: Sequence[Any], options: Mapping[str, Any], device: int) -> tuple[Hashable, list[Any]]:
    """What is compiled for a launch (None: not known here), and its arguments as the compiled kernel takes them.

    The address stands for a tensor of ``device``; of another one Triton's launcher must see whether it can be read.
    """
    kind: list[Hashable] = [device, len(options), *options, *options.values()]
    passed: list[Any] = []
    for value in arguments:
        what = type(value)
        if what is int:
            kind.append(("" if value & 15 else "16") if 1 < value < _INT32_END else value)
        elif what is Tensor or what is Parameter:
            address = value.data_ptr()
            kind.append(value.dtype)
            if address & 15:
                kind.append(_MISPLACED)
            if value.get_device() == device:
                value = address
        elif value is None:
            kind.append(None)
        elif what is float or what is bool:
            kind.append(what)
        elif what is TensorDescriptor:
            kind += (what, value.base.dtype, tuple(value.block_shape))
        else:
            return None, passed
        passed.append(value)
    return tuple(kind), passed


def _watched(function: JITFunction) -> bool:
    """Whether launches or compilation are watched or debugged by what Triton asks at every launch."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(
        function.pre_run_hooks
        or getattr(enter, "calls", enter)
        or getattr(leave, "calls", leave)
        or runtime.add_stages_inspection_hook
        or runtime.debug
        or knobs.compilation.instrumentation_mode
    )
