"""Where prompts come from: datasets, their order, and how they become tokens.

A dataset source is ``(options) -> Dataset``. Nothing here imports a tokenizer library or a task library before use.
"""

from __future__ import annotations

from vime_core.data.types import Dataset, Example, Message

__all__ = ["Dataset", "Example", "Message"]
