"""Run as a program: start an engine, answer requests together and some of them alone, and say how it went.

Reads a pickled (context, requests, places) from standard input and writes a pickled `Answers` to its only argument.
"""

from __future__ import annotations

import pickle
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vime_core.types import Completion
from vime_vllm.rollout import open_rollout


@dataclass(frozen=True)
class Answers:
    """``alone`` are those of chosen places; ``preempted`` says how often a request of ``together`` was."""

    settings: dict[str, Any]
    draws_by_contract: bool
    together: list[Completion]
    alone: dict[int, Completion]
    preempted: int


def answer(context: Any, requests: Any, places: Any) -> Answers:
    rollout: Any = open_rollout(context)
    try:
        rollout.call("vime_vllm.testing:record_schedule")
        together = rollout.generate(requests)
        preempted = len(rollout.call("vime_vllm.testing:preempted")[0])
        alone = {place: rollout.generate([requests[place]])[0] for place in places}
        worker = rollout.processes()[1]
        return Answers(dict(worker.settings), rollout.draws_by_contract(), together, alone, preempted)
    finally:
        rollout.close()


if __name__ == "__main__":
    import aligned_answers  # so that what is pickled belongs to a module that the reader has too

    Path(sys.argv[1]).write_bytes(pickle.dumps(aligned_answers.answer(*pickle.load(sys.stdin.buffer))))
