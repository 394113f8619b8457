"""Which modules really run, and whether anything computes outside the contract's operations.

A probe forward is watched from two places: every module that is called is counted by its type, and every torch
operator that is dispatched while no operation is on the Python stack has to be one that only moves elements.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vime_core.errors import ContractViolation
from vime_core.numerics import Operations

OPERATIONS: Final = "vime_core.numerics"
"""Where the operations of ``dense/v1`` are computed; a contract of more has a package of its own beside it."""
MOVES: Final = (
    *("alias", "arange", "as_strided", "cat", "clone", "contiguous", "copy_", "detach"),
    *("empty", "empty_like", "expand", "index", "index_select", "lift_fresh", "new_ones", "ones"),
    *("permute", "reshape", "select", "slice", "split", "split_with_sizes", "squeeze", "stack"),
    *("t", "transpose", "unbind", "unsqueeze", "view", "_reshape_alias", "_unsafe_view"),
)
"""Operators of ``aten`` that make no new number from old ones, as long as the dtype stays."""


def census(model: torch.nn.Module, forward: Callable[[], object]) -> dict[str, int]:
    """Run ``forward`` and count the modules that it called, by the name of their type.

    Raises:
        ContractViolation: an operator computed floats outside the operations; names it and the module.
    """
    watch = _Watch(_packages(model))
    with torch.no_grad(), watch.modules(), watch:
        forward()
    if watch.outside:
        raise _violation(f"computed outside the contract's operations: {'; '.join(sorted(watch.outside))}")
    ran = [module for module in model.modules() if id(module) in watch.called]
    if not ran:
        raise _violation("the probe forward called no module of the model")
    return dict(sorted(Counter(type(module).__name__ for module in ran).items()))


def held_operations(model: torch.nn.Module) -> Operations:
    """The one `Operations` object that the modules of a model hold.

    Raises:
        ContractViolation: they hold none, or several.
    """
    held = {id(o): o for m in model.modules() if isinstance(o := getattr(m, "operations", None), Operations)}
    if len(held) != 1:
        providers = ", ".join(sorted(f"{o.provider} {o.digest[:12]}" for o in held.values())) or "none"
        raise _violation(f"the model's modules hold {len(held)} sets of operations ({providers}), not one")
    return next(iter(held.values()))


def _packages(model: torch.nn.Module) -> tuple[str, ...]:
    """How names of modules begin whose frames are operations: the core's, and where the held operations' class is of.

    Where that would be all of a distribution, its modules among it, the class's own file stands for it.
    """
    kinds = {type(o) for m in model.modules() if isinstance(o := getattr(m, "operations", None), Operations)}
    parents = {kind.__module__: kind.__module__.rpartition(".")[0] for kind in kinds}
    names = [OPERATIONS, *(parent if "." in parent else file for file, parent in parents.items())]
    return tuple(f"{name}." for name in names)


class _Watch(TorchDispatchMode):
    def __init__(self, packages: tuple[str, ...]) -> None:
        super().__init__()
        self._packages = packages
        self.called: set[int] = set()
        self.outside: set[str] = set()
        self._running: list[str] = []

    @contextmanager
    def modules(self) -> Generator[None]:
        """Follow which module is being called."""
        hooks = (register_module_forward_pre_hook(self._enter), register_module_forward_hook(self._leave))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if _computes(func, args, result) and not _within_an_operation(self._packages):
            where = self._running[-1] if self._running else "no module"
            self.outside.add(f"{func._schema.name} in {where}")
        return takeable(result)

    def _enter(self, module: torch.nn.Module, _: object) -> None:
        self.called.add(id(module))
        self._running.append(type(module).__name__)

    def _leave(self, *_: object) -> None:
        self._running.pop()


def takeable(result: Any) -> Any:
    """What torch takes back from a mode: in a list of tensors it knows no undefined ones, as FlashAttention 3 gives."""
    return [torch.empty(0) if one is None else one for one in result] if isinstance(result, list) else result


def _computes(operator: Any, arguments: object, result: object) -> bool:
    """Whether an operator may have made a new float: any but a move, and a move between dtypes."""
    made = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
    if made and not any(t.is_floating_point() for t in made):
        return False  # positions, lengths, masks
    namespace, _, name = str(operator._schema.name).partition("::")
    tensors = [t for t in tree_leaves((arguments, result)) if isinstance(t, Tensor)]
    dtypes = {t.dtype for t in tensors if t.is_floating_point()}
    if not dtypes:
        return False  # whole numbers, and bytes on their way to another rank
    return namespace != "aten" or name not in MOVES or len(dtypes) > 1


def _within_an_operation(packages: tuple[str, ...]) -> bool:
    frame = inspect.currentframe()
    while frame is not None:
        if f"{frame.f_globals.get('__name__', '')}.".startswith(packages):
            return True
        frame = frame.f_back
    return False


def _violation(what: str) -> ContractViolation:
    return ContractViolation(
        f"the trainer's model does not keep its contract: {what}",
        remedy="Build every module from the operations that the side was given, or clear alignment.contract.",
        code="VIME-ALIGN-036",
    )
