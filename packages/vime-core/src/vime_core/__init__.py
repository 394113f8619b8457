"""Plugins, configuration, determinism policies, numerics, run records, verdicts and the RL loop of vime."""

from typing import Final

__version__: Final = "0.1.0"
