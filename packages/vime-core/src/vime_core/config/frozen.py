"""Values that stay as they were validated: dictionaries that refuse changes, and lists as tuples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn, cast

from pydantic import BaseModel


class FrozenDict(dict[str, Any]):
    """A dict that raises TypeError on every change; `thaw` gives a plain copy."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("this part of a configuration is frozen; thaw() gives a copy to change")

    __setitem__ = __delitem__ = __ior__ = _refuse  # pyright: ignore[reportAssignmentType]
    clear = pop = popitem = setdefault = update = _refuse  # pyright: ignore[reportAssignmentType]

    def __reduce__(self) -> tuple[type[FrozenDict], tuple[dict[str, Any]]]:
        return FrozenDict, (dict(self),)


def freeze(value: Any) -> Any:
    """The same value without anything in it that can be changed; the fields of models are replaced in place."""
    if isinstance(value, BaseModel):
        for name, part in list(vars(value).items()):
            object.__setattr__(value, name, freeze(part))
        return value
    if isinstance(value, Mapping):
        return FrozenDict({name: freeze(part) for name, part in cast("Mapping[str, Any]", value).items()})
    if isinstance(value, list | tuple):
        return tuple(freeze(part) for part in cast("list[Any]", value))
    return value


def thaw(value: Any) -> Any:
    """A plain copy: dictionaries and lists, as JSON has them."""
    if isinstance(value, Mapping):
        return {name: thaw(part) for name, part in cast("Mapping[str, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [thaw(part) for part in cast("list[Any]", value)]
    return value
