"""A negative control: with VIME_TEST_FLIP set, one bit of one weight of the live trainer flips after the second step.

The plugin is loaded in both of the runs that are compared, so that their configurations are equal.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from vime_core.backends import Trainer
from vime_core.plugins import hookimpl

TENSOR = "model.layers.1.mlp.down_proj.weight"


@hookimpl
def vime_before_train_step(step: int, trainer: Trainer) -> None:
    if step == 1 and "VIME_TEST_FLIP" in os.environ:
        _flip_after_training(trainer)


def _flip_after_training(trainer: Any) -> None:
    train_step = trainer.train_step

    def train_and_flip(*arguments: Any) -> Any:
        result = train_step(*arguments)
        flip_lowest_bit(dict(trainer.weights())[TENSOR])
        trainer.train_step = train_step
        return result

    trainer.train_step = train_and_flip


def flip_lowest_bit(weight: torch.Tensor) -> None:
    """One ulp of the sixth element, in place: the tensor must be the trainer's own, not a copy."""
    bits = weight.detach().view(-1).view(torch.int16)
    bits[5] ^= 1
