"""A negative control: with VIME_TEST_FORGET set, the live trainer forgets the count of its scheduler when it loads.

No digest of weights or moments sees that; the learning rate of the next step does.
"""

from __future__ import annotations

import os
from typing import Any

from vime_core.config.schema import RunConfig
from vime_core.plugins import hookimpl


@hookimpl
def vime_before_run(config: RunConfig) -> None:
    if "VIME_TEST_FORGET" in os.environ:
        _forget()


def _forget() -> None:
    from vime_megatron.rank import TrainerRank

    load = TrainerRank.load

    def load_and_forget(self: Any, directory: Any) -> None:
        load(self, directory)
        self._optimization.scheduler.num_steps = 0

    TrainerRank.load = load_and_forget  # type: ignore[method-assign]
