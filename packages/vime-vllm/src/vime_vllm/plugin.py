"""What vime-vllm registers. Runs at discovery, so it imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterable

from vime_core.plugins import hookimpl
from vime_core.plugins.types import RolloutEngine


@hookimpl
def vime_rollouts() -> Iterable[RolloutEngine]:
    """The rollout engine ``vllm``."""
    yield RolloutEngine(
        "vllm",
        "vLLM in its own processes, with weights checked tensor by tensor.",
        "vime_vllm.rollout:open_rollout",
        "vime_vllm.options:VllmOptions",
    )
