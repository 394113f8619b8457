"""Faults and instruments for a live engine, for tests: ``rollout.call("vime_vllm.testing:flip_bit", NAME, 0)``.

Each function runs in a worker of the engine and takes and gives plain data. None of them is used by vime itself.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from vime_vllm.engine_side.in_place import loads_in_place
from vime_vllm.engine_side.plain_linear import plain_linear
from vime_vllm.engine_side.weights import kernel_tensors


def flip_bit(worker: Any, name: str, index: int) -> None:
    """Flip the lowest bit of one element of a tensor that kernels read: the smallest possible change of it."""
    tensors = dict(kernel_tensors(worker.model_runner.get_model()))
    flat = tensors[name].view(-1)
    bits = flat.view({2: torch.int16, 4: torch.int32}[flat.element_size()])
    bits[index] ^= 1


def keep_out(worker: Any, name: str) -> None:
    """From now on the model drops every update of a tensor, and says nothing."""
    model = worker.model_runner.get_model()
    load = model.load_weights

    def without(weights: Iterable[tuple[str, Tensor]]) -> Any:
        return load((found, tensor) for found, tensor in weights if found != name)

    model.load_weights = without


def swap(worker: Any, first: str, second: str) -> None:
    """From now on the model takes two tensors of one shape for each other, until `let_in`."""
    model = worker.model_runner.get_model()
    load, other = model.load_weights, {first: second, second: first}

    def swapped(weights: Iterable[tuple[str, Tensor]]) -> Any:
        return load((other.get(name, name), tensor) for name, tensor in weights)

    model.load_weights = swapped


def in_place(worker: Any) -> bool:
    """Whether updates are written where kernels read."""
    return loads_in_place(worker.model_runner.get_model())


def reload_layers(worker: Any, wanted: bool) -> None:
    """Update as vLLM reloads a checkpoint, whatever the model; False: undo that."""
    model = worker.model_runner.get_model()
    if wanted:
        model.vime_loads_in_place = False
    else:
        del model.vime_loads_in_place


def keep_out_on_rank(worker: Any, rank: int, name: str) -> None:
    """`keep_out` on one tensor parallel rank only."""
    if worker.rank == rank:
        keep_out(worker, name)


def let_in(worker: Any) -> None:
    """Undo `keep_out` or `swap`."""
    del worker.model_runner.get_model().load_weights


def pack_layer(worker: Any, name: str) -> None:
    """Let one linear layer compute from a packed copy of its weight, as stock vLLM does on a CPU."""
    ops = importlib.import_module("vllm._custom_ops")
    layer = worker.model_runner.get_model().get_submodule(name)
    handler = ops.create_onednn_mm(layer.weight.t(), 32)

    def packed_linear(x: Tensor, _weight: Tensor, bias: Tensor | None) -> Tensor:
        return ops.onednn_mm(handler, x, bias)

    layer.cpu_linear = packed_linear


def unpack_layer(worker: Any, name: str) -> None:
    """Undo `pack_layer`."""
    worker.model_runner.get_model().get_submodule(name).cpu_linear = plain_linear


def damage_buffer(worker: Any) -> str:
    """Change one element of the model's first buffer; returns its name."""
    name, buffer = next(iter(worker.model_runner.get_model().named_buffers()))
    buffer.view(-1)[0] += 1
    return name


def mend_buffer(worker: Any) -> None:
    """Undo `damage_buffer`."""
    next(iter(worker.model_runner.get_model().buffers())).view(-1)[0] -= 1


def mislabel(worker: Any, version: int) -> None:
    """Let the engine claim another weight version."""
    worker.weight_transfer_engine.version = version


def keep_version(worker: Any) -> None:
    """From now on an update leaves the weight version as it was, until `take_version`."""
    engine = worker.weight_transfer_engine
    finish, held = engine.finish_weight_update, engine.version

    def finish_weight_update() -> None:
        finish()
        engine.version = held

    engine.finish_weight_update = finish_weight_update


def take_version(worker: Any) -> None:
    """Undo `keep_version`."""
    del worker.weight_transfer_engine.finish_weight_update


def record_schedule(worker: Any) -> None:
    """Note from now on, for every engine step, how many tokens of each request it computes, and who was preempted."""
    worker.vime_schedule, worker.vime_preempted = [], []
    if hasattr(worker, "vime_execute_model"):
        return
    worker.vime_execute_model = worker.execute_model

    def execute_model(scheduler_output: Any) -> Any:
        if counts := list(scheduler_output.num_scheduled_tokens.values()):
            worker.vime_schedule.append(counts)
        worker.vime_preempted += scheduler_output.preempted_req_ids or ()
        return worker.vime_execute_model(scheduler_output)

    worker.execute_model = execute_model


def schedule(worker: Any) -> list[list[int]]:
    """What `record_schedule` noted, by engine step."""
    return worker.vime_schedule


def preempted(worker: Any) -> list[str]:
    """Ids of requests that were preempted since `record_schedule`."""
    return worker.vime_preempted
