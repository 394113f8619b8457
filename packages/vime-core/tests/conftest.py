"""Property tests draw the same examples in every run, and a slow machine fails none of them."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("vime", deadline=None, derandomize=True)
settings.load_profile("vime")
