"""From step 1 on the engine misreports the log-probs of the second half of a step's samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vime_core.plugins import hookimpl


@hookimpl
def vime_after_weight_update(step: int, rollout: Any) -> None:
    if step == 0:
        sound = rollout.generate

        def generate(requests: Sequence[Any]) -> list[Any]:
            found = sound(requests)
            half = len(found) // 2
            return found[:half] + [replace(one, log_probs=one.log_probs * 1.5) for one in found[half:]]

        rollout.generate = generate
