"""One microbatch as one packed forward: token ids, positions, and which rows give which log-probs."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vime_core.numerics import masked
from vime_core.types import Float32Array, TrainSequence


@dataclass(frozen=True)
class PackedMicrobatch:
    """N response tokens in T input tokens, sequences one after another.

    A sequence's last token predicts nothing, so it is no input: a sequence of L tokens has L - 1 inputs.

    Args:
        tokens: int64 [T].
        positions: int64 [T], from 0 in every sequence.
        lengths: input tokens of each sequence, in order.
        rows: int64 [N], the inputs whose next token is a response token.
        targets: int64 [N], those next tokens.
        response_lengths: response tokens of each sequence, in order; they sum to N.
        kept: (rows, ids), int64 [K] each, of the tokens that were left to choose from where top-k or top-p cut; rows
            count response tokens. None: nothing was cut.
    """

    tokens: Tensor
    positions: Tensor
    lengths: tuple[int, ...]
    rows: Tensor
    targets: Tensor
    response_lengths: tuple[int, ...]
    kept: tuple[Tensor, Tensor] | None = None

    def left_to_choose(self, logits: Tensor) -> Tensor:
        """Logits [N, V] with -inf where top-k or top-p had cut when the response was sampled."""
        if self.kept is None:
            return logits
        rows, ids = self.kept
        keep = torch.ones(logits.shape, dtype=torch.bool, device=logits.device)
        keep[rows] = False
        keep[rows, ids] = True
        return masked(logits, keep)

    def split(self, values: Tensor) -> list[Float32Array]:
        """[N] on any device as one fp32 array [R] a sequence."""
        parts = values.detach().cpu().split(list(self.response_lengths))
        return [np.array(part.numpy(), dtype=np.float32) for part in parts]


def pack_microbatch(sequences: Sequence[TrainSequence], device: torch.device) -> PackedMicrobatch:
    """Concatenate sequences in order.

    Raises:
        ValueError: there is no sequence, or one has no prompt token or no response token.
    """
    if not sequences:
        raise ValueError("a microbatch needs at least one sequence")
    for sequence in sequences:
        if not 0 < sequence.response_start < len(sequence.tokens):
            raise ValueError(f"sequence {sequence.key} needs a prompt and a response of at least one token each")
    lengths = tuple(len(sequence.tokens) - 1 for sequence in sequences)
    starts = np.cumsum((0, *lengths[:-1]))
    rows = [
        np.arange(start + sequence.response_start - 1, start + length)
        for start, length, sequence in zip(starts, lengths, sequences, strict=True)
    ]
    return PackedMicrobatch(
        tokens=_on(device, [np.array(s.tokens[:-1]) for s in sequences]),
        positions=_on(device, [np.arange(length) for length in lengths]),
        lengths=lengths,
        rows=_on(device, rows),
        targets=_on(device, [np.array(s.tokens[s.response_start :]) for s in sequences]),
        response_lengths=tuple(s.response_length for s in sequences),
        kept=_kept(sequences, device),
    )


def _kept(sequences: Sequence[TrainSequence], device: torch.device) -> tuple[Tensor, Tensor] | None:
    if not any(sequence.kept.tokens for sequence in sequences):
        return None
    counts = [np.array(s.kept.counts or (0,) * s.response_length) for s in sequences]
    rows = np.repeat(np.arange(sum(map(len, counts))), np.concatenate(counts))
    return _on(device, [rows]), _on(device, [np.array(s.kept.tokens, dtype=np.int64) for s in sequences])


def flatten(arrays: Sequence[Float32Array], device: torch.device) -> Tensor:
    """One fp32 array [R] a sequence as one tensor [N]."""
    return upload(np.concatenate(arrays).astype(np.float32, copy=False), device)


def upload(values: NDArray[Any], device: torch.device) -> Tensor:
    """Values of the host on the device, without waiting for what the device has yet to do."""
    host = torch.from_numpy(values)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def _on(device: torch.device, parts: Sequence[NDArray[np.int64]]) -> Tensor:
    return upload(np.concatenate(parts).astype(np.int64, copy=False), device)
