"""One clear error where a package is absent or of another version."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version

from vime_core.errors import PluginError

TESTED = "0.19.2"


def require_megatron() -> str:
    """The installed version of megatron-core.

    Raises:
        PluginError: it is absent, or not of the 0.19 series whose internals this package was written for.
    """
    try:
        found = version("megatron-core")
    except PackageNotFoundError:
        raise _unusable("trainer.backend = 'megatron' needs megatron-core, which is not installed") from None
    if found.split(".")[:2] != TESTED.split(".")[:2]:
        raise _unusable(f"megatron-core {found} is installed, but this package works with {TESTED[:4]}.x")
    return found


def require_transformers(needed_by: str, extra: str) -> None:
    """Raise PluginError when transformers is absent.

    Args:
        needed_by: what needs it, as a configuration names it.
        extra: of this package, that brings it.
    """
    try:
        version("transformers")
    except PackageNotFoundError:
        raise PluginError(
            f"{needed_by} needs transformers, which is not installed",
            remedy=f"Run: pip install 'vime-megatron[{extra}]'",
            code="VIME-PLUGIN-022",
        ) from None


def _unusable(message: str) -> PluginError:
    if sys.version_info >= (3, 12):
        command = "pip install 'vime-megatron[megatron]'"
    else:
        command = f"pip install --no-deps --ignore-requires-python megatron-core=={TESTED}"
    return PluginError(message, remedy=f"Run: {command}", code="VIME-PLUGIN-020")
