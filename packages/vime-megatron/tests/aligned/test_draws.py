"""What the trainer draws again: token by token from a forward of each sequence by itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from vime_core.alignment.taps import LOGITS
from vime_core.numerics import Operations, masked
from vime_core.numerics.draw import numbers
from vime_core.types import Drawn, KeptTokens, SampleRequest, TrainSequence
from vime_megatron.aligned.testing import WholeSequence
from vime_megatron.model import DTYPES
from vime_megatron.testing import random_sequences, run_config

SEQUENCES = random_sequences([(9, 20), (1, 31), (20, 7), (3, 1), (5, 16), (2, 40)])
SAMPLING = [(1.0, 1.0, 0), (0.7, 0.9, 0), (0.0, 0.5, 3), (1.3, 1.0, 5), (2.5, 0.8, 40), (0.7, 0.9995, 0)]
"""Temperature, top-p and top-k of each; greedy takes the likeliest whatever the others say."""
REQUESTS = {
    s.key: SampleRequest(*s.key, s.tokens[: s.response_start], 2**62 + 977 * n, 64, temperature, top_p, top_k)
    for n, (s, (temperature, top_p, top_k)) in enumerate(zip(SEQUENCES, SAMPLING, strict=True))
}


def by_hand(operations: Operations, logits_RV: Tensor, sequence: TrainSequence, request: SampleRequest) -> Drawn:
    """One row at a time, with the request's own settings."""
    tokens: list[int] = []
    scores: list[float] = []
    left: list[list[int]] = []
    places = numbers(request.seed, len(logits_RV), logits_RV.device)
    for place, target in enumerate(sequence.tokens[sequence.response_start :]):
        row, keep = logits_RV[place : place + 1].float(), torch.ones(1, logits_RV.shape[1], dtype=torch.bool)
        if request.temperature:
            keep = operations.keep_mask(row, request.temperature, request.top_k, request.top_p)
            drawn = operations.draw(masked(row, keep), places[place : place + 1], request.temperature)
        else:
            drawn = row.argmax(-1)
        tokens.append(int(drawn))
        scores.append(float(operations.token_log_probs(masked(row, keep), torch.tensor([target]), request.temperature)))
        left.append([] if bool(keep.all()) else keep[0].nonzero()[:, 0].tolist())
    kept = KeptTokens(tuple(i for ids in left for i in ids), tuple(map(len, left)) if any(left) else ())
    return Drawn(tuple(tokens), torch.tensor(scores).numpy(), kept)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_request_is_drawn_as_it_would_be_alone(
    dtype: str, llama: Path, operations: Operations, open_aligned: Callable[..., Any]
) -> None:
    reference = WholeSequence.open(operations, llama, DTYPES[dtype])
    trainer = open_aligned(llama, run_config(dtype=dtype))
    order = [[SEQUENCES[3], SEQUENCES[0], SEQUENCES[4]], [SEQUENCES[2], SEQUENCES[5], SEQUENCES[1]]]
    found = trainer.draw_again(order, REQUESTS)
    for sequence, drawn in zip([s for microbatch in order for s in microbatch], found, strict=True):
        seen: dict[str, Tensor] = {}
        reference.log_probs(sequence, 1.0, seen.__setitem__)
        expected = by_hand(operations, seen[LOGITS], sequence, REQUESTS[sequence.key])
        assert (drawn.tokens, drawn.kept) == (expected.tokens, expected.kept)
        assert drawn.log_probs.tobytes() == expected.log_probs.tobytes()
    assert any(0 in drawn.kept.counts and max(drawn.kept.counts) > 0 for drawn in found)  # cut here, and there not
    assert len({drawn.tokens[:5] for drawn in found}) == len(found)
