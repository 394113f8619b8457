"""The vLLM rollout of vime: engine processes, weight transfer with digests, ordered results."""

from typing import Final

__version__: Final = "0.1.0"
