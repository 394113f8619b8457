"""What a provider supplies: the operations that are more than data movement, forward and backward, without autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vime_core.numerics.attention import AttentionSpec, KvCache, PagedBatch
from vime_core.numerics.offers import LinearCall


def _nothing(*_: object) -> None:
    """For a provider without a choice."""


@dataclass(frozen=True)
class Kernels:
    """The operations of one provider; shapes and meaning are those of the modules that are named.

    Temperatures are as requests have them: at 0 a kernel scores and cuts at 1, and draws the largest logit.

    Attributes:
        chunk_count: (N, K) -> C of the provider.
        embedding_backward: dy (T, H), ids (T), V -> dw (V, H) (:mod:`.embedding`).
        linear: x, weight, bias, chunks, wide -> y (:mod:`.linear`).
        linear_partials: x, weight, chunks -> fp32 chunk sums (C, ..., N).
        column_sum: x (M, K) -> the rows added in ascending order, fp32 (K).
        add_rms_norm: x, residual, weight, eps -> y, r (:mod:`.rms_norm`).
        add_rms_norm_backward: dy, dr, r, weight, eps -> dr, dw (fp32).
        rope: x, positions, table, interleaved, inverse -> turned x (:mod:`.rope`).
        swiglu: [gate | up] -> h (:mod:`.swiglu`).
        swiglu_backward: dh, [gate | up] -> its gradient.
        attention_packed: q, k, v, cu_seqlens, spec -> o, lse (:mod:`.attention`).
        attention_backward: dy, q, k, v, o, lse, cu_seqlens, spec -> dq, dk, dv.
        attention_paged: q, cache, batch, spec, o; fills the asked rows of o.
        write_kv: k, v, cache, slots.
        log_softmax: logits, temperatures -> log p (:mod:`.log_probs`).
        token_log_probs: logits, ids, temperatures -> log p of the ids.
        token_log_probs_backward: grad, logits, ids, temperatures -> dlogits.
        keep_mask: logits, temperatures, top_k, top_p -> bool (:mod:`.truncation`).
        draw_numbers: seeds, places in the response -> random numbers (:mod:`.draw`).
        draw: logits, temperatures, random numbers -> token ids (:mod:`.draw`).
        adds_as_torch: whether torch's own sum of two tensors, which knows its gradient, has the bits of
            ``add_rms_norm``'s r.
        choices: what serves each call where kernels of other packages may (:mod:`.chosen_linear`), so far.
        settle: choose for these calls, on a device, before anything waits for them.
        settle_gradients: choose for the gradients of all weights that a forward has seen, on a device.
    """

    chunk_count: Callable[[int, int], int]
    embedding_backward: Callable[[Tensor, Tensor, int], Tensor]
    linear: Callable[[Tensor, Tensor, Tensor | None, int, bool], Tensor]
    linear_partials: Callable[[Tensor, Tensor, int], Tensor]
    column_sum: Callable[[Tensor], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor | None, Tensor, float], tuple[Tensor, Tensor]]
    add_rms_norm_backward: Callable[[Tensor, Tensor | None, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    rope: Callable[[Tensor, Tensor, Tensor, bool, bool], Tensor]
    swiglu: Callable[[Tensor], Tensor]
    swiglu_backward: Callable[[Tensor, Tensor], Tensor]
    attention_packed: Callable[[Tensor, Tensor, Tensor, Tensor, AttentionSpec], tuple[Tensor, Tensor]]
    attention_backward: Callable[
        [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, AttentionSpec], tuple[Tensor, Tensor, Tensor]
    ]
    attention_paged: Callable[[Tensor, KvCache, PagedBatch, AttentionSpec, Tensor], None]
    write_kv: Callable[[Tensor, Tensor, KvCache, Tensor], None]
    log_softmax: Callable[[Tensor, Tensor], Tensor]
    token_log_probs: Callable[[Tensor, Tensor, Tensor], Tensor]
    token_log_probs_backward: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    keep_mask: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    draw_numbers: Callable[[Tensor, Tensor], Tensor]
    draw: Callable[[Tensor, Tensor, Tensor], Tensor]
    adds_as_torch: bool = False
    choices: Callable[[], Mapping[str, str]] = dict
    settle: Callable[[Iterable[LinearCall], torch.device], None] = _nothing
    settle_gradients: Callable[[torch.device], None] = _nothing
