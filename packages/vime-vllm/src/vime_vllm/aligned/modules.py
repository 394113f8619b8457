"""What an aligned model class is built from: modules that hold weights and call the contract's operations.

A module that fuses several weights of a Hugging Face directory into one parameter says so in ``parts``; names of
parameters are otherwise those of the directory. Parameters are filled by their ``weight_loader`` alone: vLLM's reload
replaces parameters and wraps loaders, and what is written past them is lost without a word.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.attention import Attention

from vime_core.numerics import Operations, RopeScaling, rope_table
from vime_core.numerics.offers import LinearCall
from vime_vllm.aligned.attention import AlignedAttentionBackend


def weight(*shape: int, rows: Sequence[int] = (), dtype: torch.dtype | None = None) -> nn.Parameter:
    """An empty parameter with its loader, of the model's dtype where none is given.

    ``rows`` are the sizes of the fused parts along the first dimension.
    """
    made = nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)
    starts = [0, *accumulate(rows)]

    def weight_loader(param: Tensor, loaded_weight: Tensor, part: int | None = None) -> None:
        target = param if part is None else param[starts[part] : starts[part + 1]]
        if target.shape != loaded_weight.shape:
            raise ValueError(f"a weight of shape {tuple(loaded_weight.shape)} does not fit {tuple(target.shape)}")
        target.copy_(loaded_weight)

    weight_loader.plain = weight_loader  # type: ignore[attr-defined]
    made.weight_loader = weight_loader  # type: ignore[attr-defined]
    return made


def is_plain(loader: Any) -> bool:
    """Whether a loader is one of `weight`'s and only copies: vLLM's wrappers carry its attributes, but are another."""
    return getattr(loader, "plain", None) is loader


class Linear(nn.Module):
    """y (..., N) = linear(x (..., K)); several outputs side by side where it has ``parts``.

    Args:
        operations: the contract's operations.
        inputs: K.
        outputs: N, or the size of each fused part.
        bias: whether there is one.
        parts: names of the fused parts in a Hugging Face directory.
    """

    def __init__(
        self,
        operations: Operations,
        inputs: int,
        outputs: int | Sequence[int],
        *,
        bias: bool = False,
        parts: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.operations, self.parts = operations, tuple(parts)
        self.part_rows = (outputs,) if isinstance(outputs, int) else tuple(outputs)
        fused = self.part_rows if parts else ()
        self.weight = weight(sum(self.part_rows), inputs, rows=fused)
        self.bias = weight(sum(self.part_rows), rows=fused) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.operations.linear(x, self.weight, self.bias)


class RmsNorm(nn.Module):
    """RMSNorm over the last dimension, with the addition to the residual stream where there is one."""

    def __init__(self, operations: Operations, size: int, eps: float) -> None:
        super().__init__()
        self.operations, self.eps = operations, eps
        self.weight = weight(size)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(normed, stream), both of x's shape; the stream is x where there is no residual."""
        if residual is None:
            return self.operations.rms_norm(x, self.weight, self.eps), x
        return self.operations.add_rms_norm(x, residual, self.weight, self.eps)


class Embedding(nn.Module):
    """Rows of a table (V, H)."""

    def __init__(self, operations: Operations, vocabulary: int, size: int) -> None:
        super().__init__()
        self.operations = operations
        self.weight = weight(vocabulary, size)

    def forward(self, ids: Tensor) -> Tensor:
        return self.operations.embedding(ids, self.weight)


class Rope(nn.Module):
    """Rotary embedding with a table of ``positions`` rows; a module of its own, since a reload keeps its buffer."""

    def __init__(
        self,
        operations: Operations,
        positions: int,
        head_dim: int,
        theta: float,
        scaling: RopeScaling,
        *,
        interleaved: bool = False,
    ) -> None:
        super().__init__()
        self.operations, self.interleaved = operations, interleaved
        table = rope_table(positions, head_dim, theta, scaling).to(torch.get_default_device())
        self.register_buffer("table", table, persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x (T, heads, dim) turned to positions (T)."""
        table: Any = self.table
        return self.operations.rope(x, positions, table, self.interleaved)


class SwiGlu(nn.Module):
    """h (..., F) of [gate | up] (..., 2F)."""

    def __init__(self, operations: Operations) -> None:
        super().__init__()
        self.operations = operations

    def forward(self, gate_up: Tensor) -> Tensor:
        return self.operations.swiglu(gate_up)


def settle_linears(model: nn.Module, operations: Operations, others: Iterable[Tensor] = ()) -> None:
    """Choose what computes each linear of a model, all at once; ``others`` are weights that no `Linear` holds."""
    own = [module.weight for module in model.modules() if isinstance(module, Linear) and module.bias is None]
    weights = [w for w in (*own, *others) if w.dtype == torch.bfloat16]
    calls = dict.fromkeys(LinearCall("forward", *w.shape, wide=False) for w in weights)
    if weights:
        operations.kernels.settle(calls, weights[0].device)


def attention_layer(
    operations: Operations,
    vllm_config: Any,
    prefix: str,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Attention:
    """vLLM's attention layer, which owns the layer's pages, with the contract's operations inside.

    Its result is (T, heads x head_dim) of query, key and value (T, heads or KV heads, head_dim).

    Args:
        operations: the contract's operations.
        vllm_config: the engine's.
        prefix: a name that no other layer has, with the layer's number in it.
        heads: query heads.
        kv_heads: key and value heads.
        head_dim: their size.
        scale: of the scores; head_dim ** -0.5 where it is None.
        window: how many keys a query sees at most, itself included; None: all.
        soft_cap: bound of the scores' size; None: none.
    """
    return Attention(
        heads,
        head_dim,
        head_dim**-0.5 if scale is None else scale,
        num_kv_heads=kv_heads,
        cache_config=vllm_config.cache_config,
        logits_soft_cap=soft_cap,
        per_layer_sliding_window=window,
        prefix=prefix,
        attn_backend=AlignedAttentionBackend,
        operations=operations,
    )
