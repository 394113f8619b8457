"""Alignment: one contract, chosen once, handed to both sides, and read back from both."""

from __future__ import annotations

from vime_core.alignment.choice import Alignment, choose_alignment, load_operations
from vime_core.alignment.offers import Offered
from vime_core.alignment.readback import CONTRACT_SETTINGS, KERNELS, require_same_contract

__all__ = [
    "CONTRACT_SETTINGS",
    "KERNELS",
    "Alignment",
    "Offered",
    "choose_alignment",
    "load_operations",
    "require_same_contract",
]
