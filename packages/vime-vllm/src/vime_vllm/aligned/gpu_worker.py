"""The GPU's worker under a contract, in a module of its own: vLLM's CPU worker changes torch when it is imported."""

from __future__ import annotations

from vllm.v1.worker.gpu_worker import Worker

from vime_vllm.aligned.worker import replace_sampler
from vime_vllm.compat import runner_version


class AlignedGpuWorker(Worker):
    """The GPU's worker."""

    def init_device(self) -> None:
        super().init_device()
        if runner_version(self) == "V1":
            replace_sampler(self)
