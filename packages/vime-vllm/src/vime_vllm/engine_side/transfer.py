"""vLLM's weight transfer engine ``vime``: the receiving half of an update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from vime_vllm.compat import finish_layerwise_reload, start_layerwise_reload, tensor_parallel_rank
from vime_vllm.engine_side.in_place import loads_in_place
from vime_vllm.memory import CudaMapping, open_shared_memory
from vime_vllm.wire import Chunk, CudaMemory, views


@dataclass
class VimeInitInfo(WeightTransferInitInfo):
    """Nothing to agree on: a chunk says everything itself."""


@dataclass
class VimeUpdateInfo(WeightTransferUpdateInfo):
    """One `vime_vllm.wire.Chunk` as plain data."""

    chunk: dict[str, Any]


class VimeTransferEngine(WeightTransferEngine[VimeInitInfo, VimeUpdateInfo]):
    """Reads chunks out of shared memory and loads them: where kernels read them, or as vLLM reloads a checkpoint.

    Attributes:
        version: the weight version that the model holds; None while an update is under way or after one failed.
    """

    init_info_cls = VimeInitInfo
    update_info_cls = VimeUpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.version: int | None = 0
        self._incoming: int | None = None
        self._in_place = False
        self._mapping: CudaMapping | None = None

    def init_transfer_engine(self, init_info: VimeInitInfo) -> None:
        """Nothing to do."""

    def start_weight_update(self) -> None:
        """Prepare every layer for new weights; until `finish_weight_update` the model has no version."""
        self.version = self._incoming = None
        self._in_place = loads_in_place(self.model)
        if not self._in_place:
            start_layerwise_reload(self.model)

    def receive_weights(self, update_info: VimeUpdateInfo) -> None:
        """Load a chunk's tensors; when this returns, the shared memory may be filled anew.

        Raises:
            ValueError: the chunk is malformed, or of another version than the update's earlier ones.
        """
        chunk = Chunk.model_validate(update_info.chunk)
        if self._incoming not in (None, chunk.version):
            raise ValueError(f"a chunk of version {chunk.version} arrived in the update to {self._incoming}")
        self._incoming = chunk.version
        flat = self._opened(chunk)[: chunk.used]
        if not self._in_place:
            # A copy, because a layer keeps its tensors until all of them are there, and the chunk goes before that.
            flat = flat.to(self.device, copy=True)
        elif flat.is_cuda and flat.device != self.device:
            flat = flat.to(self.device)  # once over the link, then in few launches
        load_weights: Any = self.model.load_weights
        load_weights(list(zip([field.name for field in chunk.tensors], views(chunk.tensors, flat), strict=True)))
        if flat.is_cuda:
            torch.cuda.synchronize()

    def finish_weight_update(self) -> None:
        """Process what is left (packed or quantised forms), then take the new version."""
        if not self._in_place:
            finish_layerwise_reload(self.model, self.model_config)
        self.version = self._incoming

    def shutdown(self) -> None:
        """Let go of the trainer's memory."""
        self._mapping = None

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Not used (abstract up to 0.26): `vime_vllm.sender` sends."""
        raise NotImplementedError

    def _opened(self, chunk: Chunk) -> Tensor:
        if not isinstance(chunk.memory, CudaMemory):
            return open_shared_memory(chunk.memory)
        self._mapping = self._mapping or CudaMapping(tensor_parallel_rank())
        return self._mapping.bytes_of(chunk.memory)
