"""The tensors that an engine's kernels read, by the names that a Hugging Face directory gives them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, cast, runtime_checkable

from torch import Tensor, nn
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from vime_vllm.compat import gather_over_tensor_parallel_ranks


@runtime_checkable
class NamesItsTensors(Protocol):
    """A model class that says itself what its kernels read, derived tensors included, under names of its choice."""

    def vime_kernel_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor) in layer order."""
        ...


def kernel_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(HF name, tensor) in layer order: views where this process holds the whole, gathered where it holds a shard.

    A tensor that two modules share appears once, under its first name; padding that vLLM adds is cut off.

    Raises:
        ValueError: a fused parameter that cannot be taken apart.
    """
    if isinstance(model, NamesItsTensors):
        yield from model.vime_kernel_tensors()
        return
    fused: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    seen: set[int] = set()
    for module_name, module in submodules(model):
        for leaf, parameter in parameters(module):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield from _named(module_name, module, leaf, parameter.data, fused)


def submodules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Every module of the model by name, in order."""
    return list(cast("Any", model).named_modules())


def parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The module's own parameters by name."""
    return list(cast("Any", module).named_parameters(recurse=False))


def _named(
    module_name: str, module: nn.Module, leaf: str, tensor: Tensor, fused: dict[str, list[str]]
) -> Iterator[tuple[str, Tensor]]:
    parent, _, last = module_name.rpartition(".")
    if last in fused:
        for part, shard, copies in zip(fused[last], *_shards(module, tensor, module_name), strict=True):
            yield _join(parent, part, leaf), _whole(module, leaf, shard, copies)
    else:
        yield _join(module_name, leaf), _whole(module, leaf, tensor, 1)


def _shards(module: Any, tensor: Tensor, name: str) -> tuple[list[Tensor], list[int]]:
    """The parts of a fused parameter (views), and how many ranks hold the same shard of each."""
    sizes = [size // module.tp_size for size in module.output_sizes]
    if tensor.ndim == 0 or sum(sizes) != tensor.shape[0]:
        raise ValueError(f"{name}: a tensor of shape {tuple(tensor.shape)} cannot be taken apart into {sizes}")
    copies = getattr(module, "num_kv_head_replicas", 1)
    return list(cast("Any", tensor).split(sizes)), [1, copies, copies][: len(sizes)]


def _whole(module: Any, leaf: str, shard: Tensor, copies: int) -> Tensor:
    """The tensor of all tensor parallel ranks, without vLLM's padding of the vocabulary."""
    dim = _sharded_dim(module, leaf)
    tensor = shard if dim is None else gather_over_tensor_parallel_ranks(shard, dim, copies)
    if isinstance(module, VocabParallelEmbedding):
        return tensor[: module.org_vocab_size]
    return tensor


def _sharded_dim(module: Any, leaf: str) -> int | None:
    if getattr(module, "tp_size", 1) == 1:
        return None
    if isinstance(module, RowParallelLinear):
        return 1 if leaf == "weight" else None
    return 0 if isinstance(module, ColumnParallelLinear | VocabParallelEmbedding) else None


def _join(*parts: str) -> str:
    return ".".join(part for part in parts if part)
