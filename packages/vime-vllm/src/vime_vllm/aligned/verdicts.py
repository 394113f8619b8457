"""What verdicts ask of a running engine, from the driver's side."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import numpy as np

from vime_core.alignment.taps import LOGITS
from vime_core.backends import Taps
from vime_core.errors import BackendError
from vime_core.types import Float32Array
from vime_vllm import compat
from vime_vllm.client import EngineClient

_INSTRUMENTS: Final = "vime_vllm.aligned.instruments"
_CENSUS: Final = "vime_vllm.aligned.census"
_PROBE: Final = (0, 1)


def take_census(engine: EngineClient) -> None:
    """Generate two tokens, so that the workers' next report can say which modules run."""
    engine.on_workers("vime_call", f"{_CENSUS}:start")
    params = compat.sampling_params(seed=0, max_tokens=2, temperature=1.0, logprobs=0, ignore_eos=True)
    engine.call("census", lambda: _one(engine.llm, params))
    engine.on_workers("vime_call", f"{_CENSUS}:stop")


def _one(llm: Any, params: Any) -> None:
    compat.enqueue(llm, _PROBE, params)
    compat.wait_for_all(llm)


def start_taps(engine: EngineClient) -> None:
    """The engine's worker records from now on."""
    engine.on_workers("vime_call", f"{_INSTRUMENTS}:start_taps")


def collect_taps(engine: EngineClient) -> Taps:
    """What the worker recorded since `start_taps`; it records no more."""
    with tempfile.TemporaryDirectory(prefix="vime-taps-") as directory:
        path = Path(directory) / "taps.safetensors"
        engine.on_workers("vime_call", f"{_INSTRUMENTS}:stop_taps", str(path))
        return read_taps(path)


def complete(taps: Taps, tokens: int) -> Taps:
    """The taps of one sequence of which ``tokens`` went through the model.

    An engine that schedules ahead computes the token that ended the response too and throws its results away: what
    lies beyond ``tokens`` is left out.

    Raises:
        BackendError: nothing was recorded, or a position is missing: the engine computed where taps do not reach.
    """
    kept = {name: _before(tokens, *recorded) for name, recorded in taps.items()}
    for name, (positions, _) in kept.items():
        found: list[int] = positions.tolist()
        if name != LOGITS and found != list(range(tokens)):
            raise _incomplete(f"tap {name!r} saw {len(found)} of {tokens} positions")
    if not kept:
        raise _incomplete("no tap was recorded")
    return kept


def _before(tokens: int, positions: Any, rows: Any) -> tuple[Any, Any]:
    inside = positions < tokens
    return positions[inside], rows[inside]


def _incomplete(what: str) -> BackendError:
    return BackendError(
        what,
        remedy="Taps need an aligned model class that calls them, and an engine without graphs.",
        code="VIME-BACKEND-067",
    )


def read_taps(path: Path) -> Taps:
    """The taps of a file that `vime_vllm.aligned.instruments.stop_taps` wrote, in the order of computation."""
    safetensors: Any = import_module("safetensors")
    with safetensors.safe_open(path, framework="pt") as file:
        names: list[str] = json.loads(file.metadata()["names"])
        return {name: (file.get_tensor(f"{name}/positions"), file.get_tensor(f"{name}/rows")) for name in names}


def prompt_scores(output: Any, tokens: Sequence[int]) -> Float32Array:
    """fp32 [len - 1] of a finished request that asked for prompt log-probs."""
    places: Sequence[Any] = output.prompt_logprobs[1:]
    values = [place[token].logprob for place, token in zip(places, tokens[1:], strict=True)]
    return np.array(values, dtype=np.float32)
