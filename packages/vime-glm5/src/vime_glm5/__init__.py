"""The GLM-5 structure (MLA, DSA, MoE, block FP8) for vime."""

from typing import Final

__version__: Final = "0.1.0"
