"""Drawing again what an engine drew: from the trainer's logits and the requests' seeds, by the same operations."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vime_core.numerics import masked
from vime_core.types import WHOLE_VOCABULARY, Drawn, KeptTokens, SampleRequest
from vime_megatron.aligned.model import AlignedModel
from vime_megatron.packing import PackedMicrobatch


def draw_again(model: AlignedModel, batch: PackedMicrobatch, requests: Sequence[SampleRequest]) -> list[Drawn]:
    """What each request's seed draws at its response tokens; ``requests`` in the order of the pack's sequences."""
    logits_NV = model.response_logits(batch).float()
    device, lengths = logits_NV.device, list(batch.response_lengths)
    rows = torch.tensor(lengths, device=device)

    def by_row(values: Sequence[Any], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device).repeat_interleave(rows)

    temperature = by_row([r.temperature for r in requests], torch.float32)
    greedy = [r.temperature == 0 for r in requests]  # takes the likeliest token, whatever top-k and top-p are
    top_k = by_row([0 if g else r.top_k for g, r in zip(greedy, requests, strict=True)], torch.int64)
    top_p = by_row([1.0 if g else r.top_p for g, r in zip(greedy, requests, strict=True)], torch.float32)
    keep_NV = model.operations.keep_mask(logits_NV, temperature, top_k, top_p)
    places = torch.cat([torch.arange(n, device=device) for n in lengths])
    u = model.operations.draw_numbers(by_row([r.seed for r in requests], torch.int64), places)
    left_NV = masked(logits_NV, keep_NV)
    tokens = model.operations.draw(left_NV, u, temperature)
    log_probs = batch.split(model.operations.token_log_probs(left_NV, batch.targets, temperature))
    return [
        Drawn(tuple(drawn.tolist()), values, _kept(keep))
        for drawn, values, keep in zip(tokens.split(lengths), log_probs, keep_NV.split(lengths), strict=True)
    ]


def _kept(keep_RV: Tensor) -> KeptTokens:
    cut = ~keep_RV.all(-1)
    if not bool(cut.any()):
        return WHOLE_VOCABULARY
    left = keep_RV & cut.unsqueeze(-1)
    return KeptTokens(tuple(left.nonzero()[:, 1].tolist()), tuple(left.sum(-1).tolist()))
