"""Taps: named intermediate tensors of a forward, recorded by both sides under the same names. Off by default.

An aligned module calls `tap` behind each operation. While nothing records, that is one look at a module variable.
Rows are keyed by token position, so a recording holds one sequence at a time: prefill, chunks and decode of one side
meet the whole-sequence forward of the other row by row.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, cast

from vime_core.errors import RecordError

if TYPE_CHECKING:
    from torch import Tensor

EMBEDDING: Final = "embedding"
FINAL_NORM: Final = "final_norm"
LOGITS: Final = "logits"
LAYER_TAPS: Final = (
    "input_norm",
    "q",
    "k",
    "v",
    "q_rope",
    "k_rope",
    "attention",
    "attention_output",
    "attention_residual",
    "post_attention_norm",
    "gate_up",
    "swiglu",
    "mlp_output",
    "hidden_state",
)
"""Names inside a layer, in the order in which they are computed; q and k are after QK-norm where there is one.

``hidden_state`` is the residual stream that the next layer reads. A structure with other operations adds its own
names between these.
"""


def layer_tap(layer: int, name: str) -> str:
    """The full name of a tap: ``layers.3.attention``. ``layer`` counts from 0."""
    return f"layers.{layer}.{name}"


class TapRecording:
    """The rows of one sequence by tap name. Tensors are copied to the host, since a caller may reuse their memory."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[int, Tensor]] = {}

    def add(self, name: str, positions: Tensor, rows: Tensor) -> None:
        """Record ``rows`` [T, ...] of the tokens at ``positions`` int [T]; whole numbers (below 2^24) as fp32.

        Raises:
            RecordError: a position comes twice under one name, so the recording holds more than one sequence.
        """
        found = self._rows.setdefault(name, {})
        copied = rows.detach().reshape(len(positions), -1).cpu().clone()
        copied = copied if copied.is_floating_point() else copied.float()
        places = cast("list[int]", positions.tolist())  # pyright: ignore[reportUnknownMemberType]
        for position, row in zip(places, copied, strict=True):
            if position in found:
                raise RecordError(
                    f"tap {name!r} saw position {position} twice",
                    remedy="Record one sequence at a time, without a prefix that is computed again.",
                    code="VIME-RECORD-020",
                )
            found[position] = row

    def names(self) -> list[str]:
        """Tap names in the order in which they were first seen."""
        return list(self._rows)

    def tensors(self) -> dict[str, tuple[Tensor, Tensor]]:
        """(positions int64 [T] ascending, rows [T, width]) by tap name."""
        import torch

        result: dict[str, tuple[Tensor, Tensor]] = {}
        for name, rows in self._rows.items():
            order = sorted(rows)
            result[name] = (torch.tensor(order, dtype=torch.int64), torch.stack([rows[p] for p in order]))
        return result


_recording: TapRecording | None = None


def tap(name: str, positions: Tensor, rows: Tensor) -> None:
    """Hand over the result of an operation, if anything records in this process."""
    if _recording is not None:
        _recording.add(name, positions, rows)


def records() -> bool:
    """Whether anything records in this process; for who would have to prepare what it hands over."""
    return _recording is not None


def start_recording() -> TapRecording:
    """Record from now on in this process, into a fresh recording."""
    global _recording
    _recording = TapRecording()
    return _recording


def stop_recording() -> None:
    """Record no more in this process."""
    global _recording
    _recording = None


@contextmanager
def recording() -> Generator[TapRecording]:
    """Record within a block."""
    try:
        yield start_recording()
    finally:
        stop_recording()
