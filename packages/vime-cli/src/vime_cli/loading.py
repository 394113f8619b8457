"""Functions of packages that may be absent."""

from __future__ import annotations

import importlib
from typing import Any

from vime_core.errors import PluginError


def optional(target: str, package: str) -> Any:
    """Import ``module:attribute`` of an optional package, or say which package to install."""
    module, _, attribute = target.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        raise PluginError(
            f"this command needs {package}, and {error.name or module} cannot be imported: {error}",
            remedy=f"pip install '{package}'",
            code="VIME-PLUGIN-003",
        ) from error
