"""Instruments of verdicts in a worker, called through ``vime_call``: taps into a file."""

from __future__ import annotations

import json
from importlib import import_module
from typing import Any

from torch import Tensor

from vime_core.alignment.taps import start_recording, stop_recording
from vime_vllm.compat import rest_graphs


def start_taps(worker: Any) -> None:
    """Record taps in this process from now on. Graphs rest: what they replay passes no tap."""
    worker.vime_graphs = rest_graphs(worker)
    worker.vime_taps = start_recording()


def stop_taps(worker: Any, path: str) -> None:
    """Record no more, and write what was recorded: ``NAME/positions`` and ``NAME/rows``, names in their order."""
    stop_recording()
    worker.vime_graphs()
    recorded = worker.vime_taps
    del worker.vime_taps, worker.vime_graphs
    tensors: dict[str, Tensor] = {}
    for name, (positions, rows) in recorded.tensors().items():
        tensors |= {f"{name}/positions": positions, f"{name}/rows": rows}
    import_module("safetensors.torch").save_file(tensors, path, metadata={"names": json.dumps(recorded.names())})
