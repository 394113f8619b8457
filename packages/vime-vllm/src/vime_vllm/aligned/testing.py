"""Faults for a live aligned engine, for tests: ``rollout.call("vime_vllm.aligned.testing:swap_operation", "swiglu")``.

Each function runs in a worker of the engine and takes and gives plain data. None of them is used by vime itself.
`restore` undoes all but `put_in`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor, nn

from vime_core.numerics import AttentionSpec, KvCache, Operations, PagedBatch, load_provider
from vime_vllm.aligned.installed import installed
from vime_vllm.aligned.modules import RmsNorm


def swap_operation(worker: Any, name: str) -> None:
    """Let one operation be computed the way stock torch does it, in all layers."""
    replace_kernel(worker, name, lambda _: _STOCK[name])


def swap_provider(worker: Any, provider: str) -> None:
    """Let the MLP's activation of every layer be computed by another provider."""
    for module in _modules(worker):
        if type(module).__name__ == "SwiGlu":
            module.operations = load_provider(provider)


def change_eps(worker: Any, name: str, eps: float) -> None:
    """Another epsilon in one norm."""
    module = worker.model_runner.get_model().get_submodule(name)
    assert isinstance(module, RmsNorm)
    worker.vime_eps = [*getattr(worker, "vime_eps", []), (module, module.eps)]
    module.eps = eps


def read_foreign_page(worker: Any) -> None:
    """Let the first request of a batch read the second one's first page."""

    def make(attend: _Attend) -> _Attend:
        def wrong(q: Tensor, cache: KvCache, batch: PagedBatch, spec: AttentionSpec, o: Tensor) -> None:
            table = batch.block_table.clone()
            if len(batch.seq_lens) > 1:
                table[0, 0] = table[1, 0]
            attend(q, cache, replace(batch, block_table=table), spec, o)

        return wrong

    replace_kernel(worker, "attention_paged", make)


def poison_foreign_pages(worker: Any) -> None:
    """Before every attention, NaN in whatever no request of the batch owns, the unused ends of pages included."""

    def make(attend: _Attend) -> _Attend:
        def poisoned(q: Tensor, cache: KvCache, batch: PagedBatch, spec: AttentionSpec, o: Tensor) -> None:
            owned = _owned(cache, batch)
            for tensor in (cache.keys, cache.values):
                tensor.masked_fill_(~owned[:, None, :, None], torch.nan)
            attend(q, cache, batch, spec, o)

        return poisoned

    replace_kernel(worker, "attention_paged", make)


def poison_owned_page(worker: Any) -> None:
    """Before every attention, a change of the first value of the first request of the batch."""

    def make(attend: _Attend) -> _Attend:
        def poisoned(q: Tensor, cache: KvCache, batch: PagedBatch, spec: AttentionSpec, o: Tensor) -> None:
            cache.values[int(batch.block_table[0, 0]), :, 0] += 1
            attend(q, cache, batch, spec, o)

        return poisoned

    replace_kernel(worker, "attention_paged", make)


def put_in(worker: Any, name: str, target: str) -> None:
    """Put a module of another class, ``module:Class()``, in the place of one of the model's."""
    module, _, attribute = target.partition(":")
    worker.model_runner.get_model().set_submodule(name, getattr(import_module(module), attribute)())


def restore(worker: Any) -> None:
    """Take back every changed kernel and epsilon."""
    for holder in _holders(worker):
        holder.operations = installed(worker.vllm_config).operations
    for module, eps in reversed(getattr(worker, "vime_eps", [])):
        module.eps = eps
    worker.vime_eps = []


def replace_kernel(worker: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Put ``make(kernel)`` in the place of one kernel of the provider, wherever it is held."""
    for holder in _holders(worker):
        operations: Operations = holder.operations
        changed = replace(operations.kernels, **{name: make(getattr(operations.kernels, name))})
        holder.operations = replace(operations, kernels=changed)


def take_the_second(worker: Any) -> None:
    """Greedy requests get the second likeliest token, scored as what it is."""

    def make(draw: Any) -> Any:
        def changed(logits: Tensor, temperatures: Tensor, u: Tensor) -> Tensor:
            return torch.where(temperatures == 0, logits.topk(2).indices[:, 1], draw(logits, temperatures, u))

        return changed

    replace_kernel(worker, "draw", make)


_Attend = Callable[[Tensor, KvCache, PagedBatch, AttentionSpec, Tensor], None]


def _owned(cache: KvCache, batch: PagedBatch) -> Tensor:
    """(pages, page size): which slots hold a token of a request."""
    pages, page = cache.keys.shape[0], cache.keys.shape[2]
    owned = torch.zeros(pages, page, dtype=torch.bool)
    lengths: list[int] = cast("Any", batch.seq_lens).tolist()
    tables: list[list[int]] = cast("Any", batch.block_table).tolist()
    for length, table in zip(lengths, tables, strict=False):
        for number in range(-(-length // page)):
            owned[table[number], : length - number * page] = True
    return owned


def _modules(worker: Any) -> list[Any]:
    return list(worker.model_runner.get_model().modules())


def _holders(worker: Any) -> list[Any]:
    modules = [worker.model_runner.sampler, *_modules(worker)]
    candidates = [*modules, *(module.impl for module in modules if hasattr(module, "impl"))]
    return [holder for holder in candidates if isinstance(getattr(holder, "operations", None), Operations)]


def _stock_swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return nn.functional.silu(gate) * up


def _stock_linear(x: Tensor, weight: Tensor, bias: Tensor | None, chunks: int, wide: bool) -> Tensor:
    del chunks, wide
    return nn.functional.linear(x, weight, bias)


def _stock_scores(logits: Tensor, ids: Tensor, temperatures: Tensor) -> Tensor:
    z = logits.float() / torch.where(temperatures == 0, 1.0, temperatures).unsqueeze(-1)
    return z.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)


_STOCK: dict[str, Callable[..., Tensor]] = {
    "swiglu": _stock_swiglu,
    "linear": _stock_linear,
    "token_log_probs": _stock_scores,
}
