"""The two pluggy markers of vime. A plugin needs `hookimpl` only."""

from __future__ import annotations

from typing import Final

import pluggy

PROJECT: Final = "vime"

hookspec: Final = pluggy.HookspecMarker(PROJECT)
hookimpl: Final = pluggy.HookimplMarker(PROJECT)
