"""What other people's code raised, in one line: exceptions of plugins are findings, not tracebacks."""

from __future__ import annotations

import re
import traceback
from typing import Final

from vime_core.errors import BackendError, VimeError

_TORCH_MEMORY: Final = re.compile(r"CUDA out of memory\. Tried to allocate[^\n]*?(?= Of the allocated memory|\n|$)")
_OTHER_MEMORY: Final = re.compile(
    r"Failed to CUDA calloc[^\n]*|Cuda failure 2 'out of memory'|CUDA error: out of memory"
)


def describe_foreign(error: BaseException) -> str:
    """Type, message and the innermost line of code: ``KeyError: 'x' (in reward.py, line 12)``."""
    message, where = text_of(error).strip(), place_of(error)
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    return f"{text} (in {where})" if where else text


def text_of(error: BaseException) -> str:
    """Its message; empty where not even that can be had."""
    try:
        return str(error)
    except Exception:
        return ""


def place_of(error: BaseException) -> str:
    """The innermost line of code: ``reward.py, line 12``; empty for an error that was not raised."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else ""


def with_notes(finding: VimeError, error: BaseException) -> VimeError:
    """A finding with the notes of the error that it stands for, such as what a run recorded."""
    for note in getattr(error, "__notes__", ()):
        finding.add_note(note)
    return finding


def out_of_gpu_memory(said: str, where: str) -> BackendError | None:
    """What to do where torch, or NCCL within it, says that a GPU's memory is used up; None where it does not.

    Args:
        said: an error's text, or what a process wrote.
        where: whose memory, such as ``the run``.
    """
    found = _TORCH_MEMORY.search(said) or _OTHER_MEMORY.search(said)
    if found is None:
        return None
    return BackendError(
        f"{where} ran out of GPU memory: {' '.join(found[0].split())}",
        remedy="Lower trainer.token_budget, set trainer.megatron.recompute = 'full', set rollout.vllm.kv_cache_gib"
        " (unset, an engine takes rollout.vllm.gpu_memory_utilization of the GPU), or free the GPU of other processes.",
        code="VIME-BACKEND-026",
    )
