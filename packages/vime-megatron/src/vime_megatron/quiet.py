"""Keeps what Megatron says at import, which no user can act on, off the terminal."""

from __future__ import annotations

import logging
import warnings


def silence_megatron() -> None:
    """Megatron warns of every absent optional package and of its own use of older torch calls; no user can act."""
    logging.getLogger("megatron").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=UserWarning, module=r"(megatron|torch\.distributed\.checkpoint)\.")
    warnings.filterwarnings(
        "ignore", category=UserWarning, message=r"The \.grad attribute of a Tensor that is not a leaf"
    )
    warnings.filterwarnings("ignore", category=FutureWarning, message=".*deprecating ShardedTensor")
    warnings.filterwarnings("ignore", category=FutureWarning, message=r"`torch\.distributed\.\w+` is deprecated")
