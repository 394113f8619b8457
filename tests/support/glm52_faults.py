"""Faults for a live engine of GLM-5, planted in its worker: ``rollout.call("glm52_faults:NAME", ...)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from glm52_kernels import (
    Kernel,
    last_dims_turned,
    last_of_ties_first,
    scaled_twice,
    shifted_at,
    slots_reversed,
    unrounded,
    with_kernels,
)
from torch import Tensor

from vime_glm5.numerics import Glm5Operations
from vime_vllm.aligned import testing


def restore(worker: Any) -> None:
    """Take back every fault; derived tensors are made anew by the next update."""
    testing.restore(worker)
    vars(_model(worker)).pop("load_weights", None)
    for module in _model(worker).modules():
        for name in ("forward", "derive", "_rows", "_attend_request"):
            vars(module).pop(name, None)


def _model(worker: Any) -> Any:
    return worker.model_runner.get_model()


def _change(worker: Any, **make: Callable[[Kernel], Kernel]) -> None:
    """Put other kernels in their places, wherever they are held."""
    for module in _model(worker).modules():
        if isinstance(getattr(module, "operations", None), Glm5Operations):
            module.operations = with_kernels(module.operations, **make)


def rotate_the_other_dims(worker: Any) -> None:
    """In every indexer, whose rotary embedding is the model's: it is handed another one."""
    for layer in _model(worker).model.layers:
        if (indexer := layer.self_attn.indexer) is not None:
            indexer.forward = _with_wrong_rope(indexer.forward)


def _with_wrong_rope(forward: Any) -> Any:
    def changed(x: Tensor, latent: Tensor, positions: Tensor, rope: Any) -> Tensor:
        turn = last_dims_turned(rope.operations.kernels.rope)
        return forward(x, latent, positions, lambda t, at: turn(t, at, rope.table, True, False))

    return changed


def break_ties_the_other_way(worker: Any) -> None:
    _change(worker, top_k=last_of_ties_first)


def norm_the_unrounded_residual(worker: Any) -> None:
    _change(worker, add_rms_norm=unrounded)


def scale_twice(worker: Any) -> None:
    _change(worker, add_shared=scaled_twice)


def reverse_slots(worker: Any) -> None:
    _change(worker, route=slots_reversed)


def shift_an_index(worker: Any, position: int) -> None:
    _change(worker, top_k=shifted_at(position))


def keep_fresh_keys_unquantised(worker: Any, layer: int) -> None:
    """Attention reads the keys of this step as they were computed, those of earlier steps from the cache."""
    attention = _model(worker).model.layers[layer].self_attn
    fresh: list[Tensor] = []
    make_rows, attend = attention._rows, attention._attend_request

    def rows(x: Tensor, positions: Tensor, rope: Any) -> Tensor:
        latent, rotary = attention.kv_a_proj_with_mqa(x).split([attention.shape.kv_lora, attention.shape.rotary], -1)
        rotated = rope(rotary.unsqueeze(1).contiguous(), positions).squeeze(1)
        fresh[:] = [torch.cat([attention.kv_a_layernorm(latent.contiguous())[0], rotated], -1)]
        return make_rows(x, positions, rope)

    def attend_request(q: Tensor, chosen: Tensor, request: Any) -> Tensor:
        operations, shape, first = attention.operations, attention.shape, request.length - (request.end - request.first)
        picked = torch.arange(request.length, device=q.device)
        keys = operations.unpack_keys(attention.cache.read(request, picked), shape.kv_lora, shape.rotary)
        keys[first:] = fresh[0][request.first : request.end]
        return operations.sparse_attention(q, keys, chosen, shape.scale, shape.kv_lora)

    attention._rows, attention._attend_request = rows, attend_request
    del attend


def keep_derived(worker: Any, name: str) -> None:
    """From now on a module keeps what it derived from its weights, whatever they become."""
    _model(worker).get_submodule(name).derive = lambda: None


def drop_update_of(worker: Any, name: str) -> None:
    """From now on one tensor of every update is passed over."""
    model = _model(worker)
    load = model.load_weights
    model.load_weights = lambda weights: load((n, t) for n, t in weights if n != name)


def negate_a_row(worker: Any, name: str) -> None:
    """Flip the sign of one row of a master weight and derive its quantised copy anew."""
    model = _model(worker)
    with torch.no_grad():
        dict(model.named_parameters())[name][0].neg_()
    model.get_submodule(name.rpartition(".")[0]).derive()
