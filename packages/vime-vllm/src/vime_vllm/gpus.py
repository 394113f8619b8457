"""Which GPUs an engine computes on, where that is said: by the order in which its processes see them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from vime_core.errors import ConfigError

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"


def visible_order(gpus: Sequence[int], visible: str | None, count: int) -> str:
    """``CUDA_VISIBLE_DEVICES`` of the engine: its own GPUs first, then the trainer's, whose memory it reads.

    Args:
        gpus: numbers among those that this process sees.
        visible: what the variable says in this process; None: it is not set.
        count: GPUs that this process sees.

    Raises:
        ConfigError: this process sees no such GPU.
    """
    if absent := [gpu for gpu in gpus if gpu >= count]:
        raise ConfigError(
            f"rollout.vllm.gpus names GPU {absent[0]}, but {count} are visible here"
            + (f" ({VISIBLE} = {visible!r})" if visible is not None else ""),
            remedy="Count from 0 among the visible ones, or leave rollout.vllm.gpus out.",
            code="VIME-CONFIG-069",
        )
    names = [str(number) for number in range(count)] if visible is None else visible.split(",")[:count]
    rest = [number for number in range(count) if number not in gpus]
    return ",".join(names[number].strip() for number in [*gpus, *rest])
