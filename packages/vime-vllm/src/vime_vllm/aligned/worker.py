"""The contract's sampler in a worker of model runner V1; V2 asks the model class for one."""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.v1.sample.sampler import Sampler

from vime_core.errors import PolicyError
from vime_vllm.aligned.installed import installed
from vime_vllm.aligned.sampler import AlignedSampler, Places
from vime_vllm.compat import class_path


def replace_sampler(worker: Any) -> None:
    """Put the contract's sampler where model runner V1 reads it.

    Raises:
        PolicyError: the runner has another sampler than stock vLLM's, or one that keeps a second reference.
    """
    runner = worker.model_runner
    if type(runner.sampler) is not Sampler or hasattr(runner, "rejection_sampler"):
        raise PolicyError(
            f"model runner {class_path(runner)} samples with {class_path(runner.sampler)}, which the contract's sampler"
            " cannot stand in for",
            remedy="Leave out plugins and options that replace vLLM's sampler.",
            code="VIME-ALIGN-029",
        )

    def places() -> Places:
        batch = runner.input_batch  # the runner makes another one when it learns the size of its cache
        return (batch.num_tokens_no_spec - batch.num_prompt_tokens).astype(np.int64)

    runner.sampler = AlignedSampler(runner.sampler, installed(worker.vllm_config).operations, places)
