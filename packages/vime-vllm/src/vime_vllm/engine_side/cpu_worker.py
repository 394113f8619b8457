"""vLLM's CPU worker with vime's one exception in force."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from vime_vllm.compat import replace_cpu_linear_dispatch
from vime_vllm.engine_side.plain_linear import keep_weight


class PlainLinearWorker(CPUWorker):
    """Keeps the weights of linear layers readable; see `vime_vllm.engine_side.plain_linear`."""

    def init_device(self) -> None:
        """Install the exception before the model is built, then go on as vLLM does."""
        replace_cpu_linear_dispatch(keep_weight)
        super().init_device()
