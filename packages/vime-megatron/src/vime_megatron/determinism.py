"""Policy flags and CPU threads of a trainer rank: set while it lives, read back for the record, undone after."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, Final

import torch

from vime_core.errors import PolicyError

_memory: Any = torch.utils.deterministic
FLAGS: Final = ("deterministic_algorithms",)


def deterministic(flags: Mapping[str, bool]) -> bool:
    """Whether a policy's flags ask for deterministic algorithms.

    Raises:
        PolicyError: a flag that this trainer does not know, and so cannot keep.
    """
    for name in flags:
        if name not in FLAGS:
            close = get_close_matches(name, FLAGS, n=1)
            hint = f"Did you mean {close[0]!r}? " if close else ""
            raise PolicyError(
                f"the policy sets flag {name!r} for the trainer, which trainer.backend = 'megatron' does not know",
                remedy=f"{hint}Use a policy with known flags: {', '.join(FLAGS)}.",
                code="VIME-ENV-020",
            )
    return flags.get("deterministic_algorithms", False)


@contextmanager
def process_settings(*, deterministic: bool, threads: int | None) -> Generator[None]:
    """Set torch's determinism and threads; the previous settings return afterwards."""
    before = (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())
    cudnn = (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark)
    threads_before, fill_before = torch.get_num_threads(), _memory.fill_uninitialized_memory
    try:
        if deterministic:
            torch.use_deterministic_algorithms(True, warn_only=False)
            # Filling every new tensor with NaN costs a quarter of a train step; here none is read before it is written.
            _memory.fill_uninitialized_memory = False
            torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
        if threads is not None:
            torch.set_num_threads(threads)
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn
        _memory.fill_uninitialized_memory = fill_before
        torch.set_num_threads(threads_before)
