"""The model class of a contract's engine side under a name in vLLM's registry."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any, Final

SIDE_VARIABLE: Final = "VIME_ENGINE_MODEL"
"""Tells the engine's processes which class to register: ``"module:Class"``."""


def architecture(side: str) -> str:
    """The registry's name for the class ``side``, which no stock model has."""
    return "Vime_" + re.sub(r"\W", "_", side)


def register_model_class(side: str, loaded: type[Any] | None = None) -> None:
    """Make the class known to vLLM in this process. Idempotent.

    Args:
        side: the class, ``"module:Class"``; vLLM imports it when it needs it.
        loaded: the class itself where it is imported already, so that vLLM starts no process to look at it.
    """
    import_module("vllm").ModelRegistry.register_model(architecture(side), loaded or side)
