"""What did the optimizer take from a train step? Its first moment tells, whatever the trainer showed.

Adam moves its first moment by ``m' = b m + (1 - b) g`` (Kingma and Ba, Adam, 2015), so ``(m' - b m) / (1 - b)`` is the
gradient that it was given, after clipping.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from torch import Tensor

MOMENT: Final = ".exp_avg"
"""How names of first moments end in `vime_core.backends.Trainer.optimizer_state`."""
TOLERANCE: Final = 1e-5
"""Relative error that rounding of moments in fp32 may leave; the smallest fault that this check can show."""
NORM_TOLERANCE: Final = 1e-4
"""The same of a gradient norm, which some trainers sum in fp32."""


@dataclass(frozen=True)
class Taken:
    """One gradient as the optimizer took it, against what the step showed and its norm clips to.

    Args:
        name: of the tensor.
        ratio: the multiple of the shown gradient that comes nearest; 1 when it is that gradient.
        error: Euclidean norm of the difference, relative to the shown gradient; inf when that is zero.
    """

    name: str
    ratio: float
    error: float

    @property
    def right(self) -> bool:
        """False for NaN."""
        return self.error <= TOLERANCE

    def __str__(self) -> str:
        return f"{self.ratio:.6g} times that of {self.name!r}, relative error {self.error:.3g}"


def clip_factor(norm: float, clip: float) -> float:
    """What a gradient of this norm is multiplied with; a ``clip`` of 0 clips nothing."""
    return min(1.0, clip / (norm + 1e-6)) if clip else 1.0


def first_moments(state: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Copies of the first moments in an optimizer's state, by the names of their parameters."""
    return {name.removesuffix(MOMENT): tensor.clone() for name, tensor in state if name.endswith(MOMENT)}


def taken_gradients(
    shown: Mapping[str, Tensor], before: Mapping[str, Tensor], after: Mapping[str, Tensor], beta: float, factor: float
) -> tuple[Taken, ...]:
    """Compare gradients with what a step made of first moments; all by one kind of names.

    Args:
        shown: before clipping.
        before: first moments before the step.
        after: and after it.
        beta: their decay.
        factor: of clipping.
    """
    names = [*after, *(name for name in shown if name not in after)]
    return tuple(
        _compare(name, shown[name], before[name], after[name], beta, factor)
        if name in shown and name in before and name in after
        else Taken(name, math.nan, math.nan)
        for name in names
    )


def _compare(name: str, shown: Tensor, before: Tensor, after: Tensor, beta: float, factor: float) -> Taken:
    wanted = shown.double() * factor
    took = (after.double() - beta * before.double()) / (1 - beta)
    square, difference = float((wanted * wanted).sum()), float((took - wanted).norm())
    if not square:
        return Taken(name, 1.0, 0.0) if not difference else Taken(name, math.inf, math.inf)
    return Taken(name, float((took * wanted).sum()) / square, difference / math.sqrt(square))


def norm_of(gradients: Iterable[Tensor]) -> float:
    """Euclidean norm of all elements, in fp64."""
    return math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))


def same_norm(told: float, norm: float) -> bool:
    """Whether a trainer's norm is that of its gradients; False for NaN."""
    return abs(told - norm) <= NORM_TOLERANCE * norm
