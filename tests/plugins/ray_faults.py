"""Faults for runs under the launcher ``ray``, chosen by VIME_TEST_RAY: an actor is killed, a replica goes astray."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from vime_core.errors import ContractViolation
from vime_core.plugins import hookimpl

ENGINE_TENSOR = "model.norm.weight"


@hookimpl
def vime_before_train_step(step: int, trainer: Any) -> None:
    if os.environ.get("VIME_TEST_RAY") == "kill" and step == 1:
        os.kill(trainer._crew.members[-1].place.pid, signal.SIGKILL)


@hookimpl
def vime_after_weight_update(step: int, rollout: Any) -> None:
    if os.environ.get("VIME_TEST_RAY") == "draw" and step == 0:
        _in_actor(rollout._crew.members[0], _take_the_second)
    if os.environ.get("VIME_TEST_RAY") == "engine":
        _in_actor(rollout._crew.members[-1], _flip_in_engine)
        try:
            rollout.weight_digests()
        except ContractViolation as error:
            Path(os.environ["VIME_TEST_SAID"]).write_text(str(error))
        _in_actor(rollout._crew.members[-1], _flip_in_engine)


def stray(trainer: Any) -> None:
    """From now on the last rank's gradients are not those of the others."""
    _in_actor(trainer._crew.members[-1], _add_to_gradients)


def _in_actor(member: Any, function: Any) -> None:
    import ray

    ray.get(member.handle.__ray_call__.remote(function))


def _add_to_gradients(host: Any) -> None:
    optimization = host._held._optimization
    reduce = optimization.reduce_gradients

    def reduce_and_stray() -> None:
        reduce()
        next(tensor for _, tensor in optimization.gradients()).view(-1)[7] += 1e-6

    optimization.reduce_gradients = reduce_and_stray


def _take_the_second(host: Any) -> None:
    host._held.call("vime_vllm.aligned.testing:take_the_second")


def _flip_in_engine(host: Any) -> None:
    host._held.call("ray_faults:flip_lowest_bit")


def flip_lowest_bit(worker: Any) -> None:
    """In the engine's worker."""
    import torch

    weight = dict(worker.model_runner.model.named_parameters())[ENGINE_TENSOR]
    weight.data.view(-1).view(torch.int16)[5] ^= 1
