"""The CPU's worker under a contract, in a module of its own: vLLM's CPU worker changes torch when it is imported."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from vime_vllm.aligned.worker import replace_sampler
from vime_vllm.compat import runner_version


class AlignedCpuWorker(CPUWorker):
    """The CPU's worker. An aligned model class holds no layer of vLLM's that packs, so nothing else is replaced."""

    def init_device(self) -> None:
        super().init_device()
        if runner_version(self) == "V1":
            replace_sampler(self)
