"""From step 1 on evaluations are wrong: their scores (VIME_TEST_FAULT=scores), or the engine's greedy choice."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vime_core.plugins import hookimpl


@hookimpl
def vime_after_weight_update(step: int, rollout: Any) -> None:
    if step == 0 and os.environ["VIME_TEST_FAULT"] == "choice":
        rollout.call("vime_vllm.aligned.testing:take_the_second")
    elif step == 0:
        sound = rollout.generate

        def generate(requests: Sequence[Any]) -> list[Any]:
            wrong = 1.5 if requests[0].temperature == 0 else 1.0
            return [replace(one, log_probs=one.log_probs * wrong) for one in sound(requests)]

        rollout.generate = generate
