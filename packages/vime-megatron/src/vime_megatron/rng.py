"""The random number generators of a process as plain JSON: Python's, numpy's, torch's and each GPU's."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import random
from typing import Any, cast

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict


class RngState(BaseModel):
    """Hexadecimal where the state is bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    python: tuple[int, tuple[int, ...], float | None]
    numpy: dict[str, Any]
    torch: str
    cuda: tuple[str, ...]


def read_rng() -> RngState:
    """The state of every generator now."""
    numpy_state = np.random.get_state(legacy=False)
    generator = {**numpy_state["state"], "key": numpy_state["state"]["key"].tolist()}
    return RngState(
        python=cast("Any", random.getstate()),
        numpy={**numpy_state, "state": generator},
        torch=_hex(torch.get_rng_state()),
        cuda=tuple(_hex(state) for state in torch.cuda.get_rng_state_all()) if torch.cuda.is_available() else (),
    )


def restore_rng(state: RngState) -> None:
    """Set every generator."""
    random.setstate(state.python)
    generator = {**state.numpy["state"], "key": np.array(state.numpy["state"]["key"], dtype=np.uint32)}
    np.random.set_state({**state.numpy, "state": generator})
    torch.set_rng_state(_bytes(state.torch))
    if state.cuda:
        torch.cuda.set_rng_state_all([_bytes(entry) for entry in state.cuda])


def _hex(state: torch.Tensor) -> str:
    return state.numpy().tobytes().hex()


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
