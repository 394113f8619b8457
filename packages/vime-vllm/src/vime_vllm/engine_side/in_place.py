"""Whether a model's weights may be written where its kernels read them, without vLLM's reload around it.

vLLM reloads a layer by bringing it back to the form of a checkpoint, gathering its tensors there, processing them and
copying the result to where kernels read. Where the processing is none, all of that copies weights to where loading
them would have put them at once, and takes most of an update's time.
"""

from __future__ import annotations

from typing import Any, Final

from torch import nn
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from vime_vllm.engine_side.weights import submodules

_UNPROCESSED: Final = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)


def loads_in_place(model: nn.Module) -> bool:
    """Whether ``model.load_weights`` alone is a whole update.

    A model class may say so itself (``vime_loads_in_place``). Of vLLM's own, those whose layers keep weights as the
    checkpoint has them; a layer of a kind that is not known to is reason enough for the reload.
    """
    said: bool | None = getattr(model, "vime_loads_in_place", None)
    return all(_is_unprocessed(module) for _, module in submodules(model)) if said is None else said


def _is_unprocessed(module: Any) -> bool:
    method = getattr(module, "quant_method", None)
    if method is not None:
        return type(method) in _UNPROCESSED
    return type(module) is Attention or not hasattr(module, "process_weights_after_loading")
