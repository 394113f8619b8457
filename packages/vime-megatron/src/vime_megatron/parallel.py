"""Process groups of one trainer rank: opened without touching the environment, closed without a trace."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch._C._distributed_c10d import HashStore

from vime_core.backends import Ranks
from vime_core.errors import BackendError
from vime_megatron.cpu_bridge import backend, cuda_bridge

TIMEOUT = timedelta(minutes=30)


@contextmanager
def process_groups(ranks: Ranks, tensor_parallel: int, expert_parallel: int = 1) -> Generator[None]:
    """Megatron's process groups for the time of the context.

    Raises:
        BackendError: this process has process groups already, of another trainer for example.
    """
    if dist.is_initialized():
        raise BackendError(
            "this process already holds torch.distributed process groups, of another trainer for example",
            remedy="Close that trainer first: a process holds one at a time.",
            code="VIME-BACKEND-020",
        )
    if torch.cuda.is_available():
        torch.cuda.set_device(ranks.local_rank)
    _meet(ranks)
    try:
        with cuda_bridge():
            parallel_state.initialize_model_parallel(
                tensor_parallel, expert_model_parallel_size=expert_parallel, create_gloo_process_groups=False
            )
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def ranks_of_process() -> dict[str, int]:
    """This process's number among the ranks that share a tensor and among those that share a step."""
    return {
        "tensor_parallel_rank": parallel_state.get_tensor_model_parallel_rank(),
        "data_parallel_rank": parallel_state.get_data_parallel_rank(),
    }


def _meet(ranks: Ranks) -> None:
    if ranks.init_method:
        dist.init_process_group(
            backend(),
            init_method=ranks.init_method,
            rank=ranks.rank,
            world_size=ranks.world_size,
            timeout=TIMEOUT,
        )
    else:
        dist.init_process_group(backend(), store=HashStore(), rank=0, world_size=1, timeout=TIMEOUT)


@contextmanager
def unchanged_environment() -> Generator[None]:
    """Undo what a library writes into ``os.environ`` meanwhile (Megatron sets Transformer Engine's variables)."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)
