"""The one place that imports Ray."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from vime_core.determinism.preflight import installed_version
from vime_core.errors import PluginError


def ray() -> Any:
    """The module ``ray``.

    Raises:
        PluginError: it is not installed.
    """
    require_ray()
    return import_module("ray")


def require_ray() -> None:
    """Raise PluginError unless Ray is installed; imports nothing."""
    if installed_version("ray") is None:
        raise PluginError(
            "run.launcher = 'ray' needs the package ray, which is not installed",
            remedy="Install it: pip install 'vime-core[ray]'; or set run.launcher = 'inline'.",
            code="VIME-PLUGIN-050",
        )
