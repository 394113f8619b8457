"""Faults for a live trainer of GLM-5, planted in its Megatron model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from glm52_kernels import (
    Kernel,
    last_dims_turned,
    last_of_ties_first,
    scaled_twice,
    shifted_at,
    slots_reversed,
    stale,
    unrounded,
    with_kernels,
)
from torch import Tensor

from vime_glm5.megatron.attention import Indexer
from vime_glm5.numerics import Glm5Operations


def restore(trainer: Any) -> None:
    """Take back every fault."""
    for module in _holders(trainer._model.modules()):
        module.operations = trainer._held.operations
        vars(module).pop("_keys", None)


def _holders(modules: Iterable[Any]) -> list[Any]:
    return [module for module in modules if isinstance(getattr(module, "operations", None), Glm5Operations)]


def _change(modules: Iterable[Any], **make: Callable[[Kernel], Kernel]) -> None:
    for module in _holders(modules):
        module.operations = with_kernels(module.operations, **make)


def rotate_the_other_dims(trainer: Any) -> None:
    _change((m for m in trainer._model.modules() if isinstance(m, Indexer)), rope=last_dims_turned)


def break_ties_the_other_way(trainer: Any) -> None:
    _change(trainer._model.modules(), top_k=last_of_ties_first)


def norm_the_unrounded_residual(trainer: Any) -> None:
    _change(trainer._model.modules(), add_rms_norm=unrounded)


def scale_twice(trainer: Any) -> None:
    _change(trainer._model.modules(), add_shared=scaled_twice)


def reverse_slots(trainer: Any) -> None:
    _change(trainer._model.modules(), route=slots_reversed)


def shift_an_index(trainer: Any, position: int) -> None:
    _change(trainer._model.modules(), top_k=shifted_at(position))


def keep_fresh_keys_unquantised(trainer: Any, layer: int) -> None:
    """One layer attends to keys as they were computed, without the cache's round trip."""
    attention = trainer._model.decoder.layers[layer].self_attention

    def keys(x: Tensor, pack: Any) -> Tensor:
        shape, ops = attention.shape, attention.operations
        latent, rotary = attention.linear_kv_down_proj(x).split([shape.kv_lora, shape.rotary], -1)
        rotated = ops.rope(rotary.unsqueeze(1).contiguous(), pack.positions, pack.rope_table, True)
        return torch.cat([attention.kv_layernorm(latent.contiguous()), rotated.squeeze(1)], -1)

    attention._keys = keys


def keep_an_expert(trainer: Any, layer: int, expert: int) -> None:
    """From now on the second matrix of an expert is computed with as it is now; what is sent to engines is not."""
    experts = trainer._model.decoder.layers[layer].mlp.experts
    _change([experts], quantise_weight=stale(experts.linear_fc2.weight[expert]))


def keep_absorbed(trainer: Any, layer: int) -> None:
    """From now on the absorbed matrices of a layer are those of its present kv_b."""
    attention = trainer._model.decoder.layers[layer].self_attention
    _change([attention], quantise_weight=stale(attention.linear_kv_up_proj.weight))
