"""Which modules really run in an aligned engine, and which of them the contract does not know.

Counted by a hook on every call of every module of the process, so that a module which was put in, wrapped around or
called from somewhere else shows too. In a worker; everything is plain data.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Final, cast

from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from vllm.model_executor.layers.attention import Attention

from vime_vllm.aligned.installed import installed
from vime_vllm.compat import class_path

_OWN: Final = "vime_vllm.aligned."


class _Census:
    def __init__(self, package: str) -> None:
        self.package = package
        self.ran: Counter[str] = Counter()
        self.foreign: set[str] = set()
        self.handle = register_module_forward_hook(self.count)

    def count(self, module: nn.Module, *_: object) -> None:
        self.ran[class_path(module)] += 1
        if foreign := foreign_part(module, self.package):
            self.foreign.add(foreign)


def foreign_part(module: nn.Module, package: str) -> str:
    """The class that the contract does not know: the module's, or its attention implementation's; or empty.

    Args:
        module: a module that ran.
        package: top-level package of the contract's engine side, whose classes are known too.
    """
    part: Any = cast("Any", module).impl if type(module) is Attention else module
    path = class_path(part)
    return "" if path.startswith((_OWN, f"{package}.")) else path


def start(worker: Any) -> None:
    """Count from now on."""
    side = installed(worker.vllm_config).side
    worker.vime_census = _Census(side.partition(".")[0].partition(":")[0])


def stop(worker: Any) -> None:
    """Count no more."""
    worker.vime_census.handle.remove()


def counted(worker: Any) -> dict[str, Any]:
    """``ran``: calls by class; ``foreign``: the classes that the contract does not know."""
    census: _Census | None = getattr(worker, "vime_census", None)
    if census is None:
        return {"ran": {}, "foreign": []}
    return {"ran": dict(sorted(census.ran.items())), "foreign": sorted(census.foreign)}
