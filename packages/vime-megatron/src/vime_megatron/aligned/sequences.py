"""What travels through Megatron beside the hidden states: positions, lengths and rotary table of a pack."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from vime_core.alignment.taps import layer_tap, records, tap

_GIVEN: Any = None  # Megatron's fields have defaults, so these must have them too


@dataclass
class AlignedSequences(PackedSeqParams):
    """A pack of T tokens.

    Args:
        positions: int64 [T], from 0 in every sequence.
        cu_seqlens: int32 [B + 1], the first token of each sequence, and T.
        rope_table: fp32 [context, R], of the model's own length.
        shared: what a layer leaves here for later ones, by a name of its structure; empty before the first layer.
    """

    positions: Tensor = _GIVEN
    cu_seqlens: Tensor = _GIVEN
    rope_table: Tensor = _GIVEN
    shared: dict[str, Tensor] = field(default_factory=dict[str, Tensor])


@dataclass(frozen=True)
class LayerTaps:
    """Hands over what a layer computed, under the names that both sides use.

    Args:
        layer: from 0.
        positions: int64 [T] of the tokens.
    """

    layer: int
    positions: Tensor

    def __call__(self, name: str, rows: Tensor) -> None:
        if records():
            tap(layer_tap(self.layer, name), self.positions, rows)
