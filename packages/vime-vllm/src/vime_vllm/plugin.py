"""What vime-vllm registers. Runs at discovery, so it imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterable

from vime_core.plugins import hookimpl
from vime_core.plugins.types import AlignedSide, RolloutEngine


@hookimpl
def vime_rollouts() -> Iterable[RolloutEngine]:
    """The rollout engine ``vllm``."""
    yield RolloutEngine(
        "vllm",
        "vLLM in its own processes, with weights checked tensor by tensor.",
        "vime_vllm.rollout:open_rollout",
        "vime_vllm.options:VllmOptions",
    )


@hookimpl
def vime_aligned_sides() -> Iterable[AlignedSide]:
    """The engine side of ``dense/v1``."""
    yield AlignedSide(
        "dense/v1 vllm",
        "Qwen2, Qwen3 and Llama in vLLM, built from the contract's operations.",
        "vime_vllm.aligned.model:AlignedDecoder",
        backend="vllm",
        contract="dense/v1",
        structures=("qwen2", "qwen3", "llama"),
    )
