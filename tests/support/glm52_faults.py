"""Faults for a live engine of GLM-5, planted in its worker: ``rollout.call("glm52_faults:NAME", ...)``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vime_core.numerics.arithmetic import narrow, widen
from vime_glm5.numerics import Glm5Operations
from vime_glm5.numerics.top_k import order_keys
from vime_vllm.aligned import testing


def restore(worker: Any) -> None:
    """Take back every fault; derived tensors are made anew by the next update."""
    testing.restore(worker)
    for module in _model(worker).modules():
        for name in ("forward", "derive", "_rows", "_attend_request"):
            vars(module).pop(name, None)


def _model(worker: Any) -> Any:
    return worker.model_runner.get_model()


def _change(worker: Any, **kernels: Any) -> None:
    """Put ``make(kernel)`` in the place of kernels of GLM-5, wherever they are held."""
    for module in _model(worker).modules():
        held = getattr(module, "operations", None)
        if isinstance(held, Glm5Operations):
            changed = {name: make(getattr(held.glm, name)) for name, make in kernels.items()}
            module.operations = replace(held, glm=replace(held.glm, **changed))


def rotate_the_other_dims(worker: Any) -> None:
    """The indexer's rotary embedding on the last dimensions of its heads."""
    for layer in _model(worker).model.layers:
        if (indexer := layer.self_attn.indexer) is not None:
            indexer.forward = _with_wrong_rope(indexer.forward)


def _with_wrong_rope(forward: Any) -> Any:
    def changed(x: Tensor, latent: Tensor, positions: Tensor, rope: Any) -> Tensor:
        def last(t: Tensor, at: Tensor) -> Tensor:
            size = rope.table.shape[1]
            return torch.cat([t[..., :-size], rope(t[..., -size:].contiguous(), at)], -1)

        return forward(x, latent, positions, last)

    return changed


def break_ties_the_other_way(worker: Any) -> None:
    """Of equal scores the later index first."""

    def make(_: Any) -> Any:
        def choose(scores: Tensor, visible: Tensor, k: int) -> Tensor:
            result = torch.full((len(scores), k), -1, dtype=torch.int32, device=scores.device)
            for row, end in enumerate(visible.tolist()):
                flipped = order_keys(scores[row, :end].flip(0))
                best = end - 1 - torch.topk(flipped, min(k, end)).indices
                result[row, : len(best)] = best.sort().values.int()
            return result

        return choose

    _change(worker, top_k=make)


def norm_the_unrounded_residual(worker: Any) -> None:
    """The norm reads the sum before it is rounded, as a fused kernel would."""

    def make(_: Any) -> Any:
        def changed(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
            wide = widen(x) if residual is None else widen(x) + widen(residual)
            normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * widen(weight)
            return narrow(normed, x.dtype), narrow(wide, x.dtype)

        return lambda x, r, w, e: changed(x, r, w, e) if r is not None else _(x, r, w, e)

    testing.replace_kernel(worker, "add_rms_norm", make)


def scale_twice(worker: Any) -> None:
    """The factor of the routed experts is applied once more."""

    def make(add_shared: Any) -> Any:
        return lambda routed, shared, factor: add_shared(routed, shared, factor * factor)

    _change(worker, add_shared=make)


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


def reverse_slots(worker: Any) -> None:
    """Experts of a token in the other order."""

    def make(route: Any) -> Any:
        return lambda *arguments: tuple(t.flip(1) for t in route(*arguments))

    _change(worker, route=make)


def keep_derived(worker: Any, name: str) -> None:
    """From now on a module keeps what it derived from its weights, whatever they become."""
    _model(worker).get_submodule(name).derive = lambda: None


def shift_an_index(worker: Any, position: int) -> None:
    """One query attends to the key beside its first one."""

    def make(top_k: Any) -> Any:
        def changed(scores: Tensor, visible: Tensor, k: int) -> Tensor:
            chosen = top_k(scores, visible, k)
            chosen[visible == position + 1, 0] += 1
            return chosen

        return changed

    _change(worker, top_k=make)


def negate_a_row(worker: Any, name: str) -> None:
    """Flip the sign of one row of a master weight and derive its quantised copy anew."""
    model = _model(worker)
    with torch.no_grad():
        dict(model.named_parameters())[name][0].neg_()
    model.get_submodule(name.rpartition(".")[0]).derive()
