"""vLLM's workers with the contract's sampler on model runner V1; V2 asks the model class for one."""

from __future__ import annotations

from typing import Any

from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from vime_core.errors import PolicyError
from vime_vllm.aligned.installed import installed
from vime_vllm.aligned.sampler import AlignedSampler
from vime_vllm.compat import class_path, runner_version


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
    runner.sampler = AlignedSampler(runner.sampler, installed(worker.vllm_config).operations)


class AlignedCpuWorker(CPUWorker):
    """The CPU's worker. An aligned model class holds no layer of vLLM's that packs, so nothing else is replaced."""

    def init_device(self) -> None:
        super().init_device()
        replace_sampler(self)


class AlignedGpuWorker(Worker):
    """The GPU's worker."""

    def init_device(self) -> None:
        super().init_device()
        if runner_version(self) == "V1":
            replace_sampler(self)
