"""Import libraries that come with an extra, or say which extra to install."""

from __future__ import annotations

import importlib
from typing import Any

from vime_core.errors import PluginError


def require(module: str, *, extra: str = "data") -> Any:
    """The imported module. Raises PluginError naming the extra of vime-core that brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise PluginError(
            f"{module!r} is needed but cannot be imported: {error}",
            remedy=f"Install it with: pip install 'vime-core[{extra}]'",
            code="VIME-PLUGIN-003",
        ) from error
