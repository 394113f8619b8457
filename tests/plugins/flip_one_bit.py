"""A negative control: one bit of one weight of the live trainer flips before the second optimizer step."""

from __future__ import annotations

import torch

from vime_core.backends import Trainer
from vime_core.plugins import hookimpl

TENSOR = "model.layers.1.mlp.down_proj.weight"


@hookimpl
def vime_before_train_step(step: int, trainer: Trainer) -> None:
    if step == 1:
        flip_lowest_bit(dict(trainer.weights())[TENSOR])


def flip_lowest_bit(weight: torch.Tensor) -> None:
    bits = weight.detach().view(-1).view(torch.int16)
    bits[5] ^= 1
