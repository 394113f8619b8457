"""The Megatron-core trainer of vime: dense structures, optimizer, checkpoints and conversion."""

from typing import Final

__version__: Final = "0.1.0"
