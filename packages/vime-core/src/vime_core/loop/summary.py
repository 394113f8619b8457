"""What a finished run says about itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vime_core.record.reader import RunRecord


@dataclass(frozen=True)
class RunSummary:
    """``first_reward`` and ``last_reward`` are mean rewards of the first and last step.

    ``resumed_at`` is the step that this process began with; 0 for a run that was never stopped. ``seconds`` are this
    process's. ``seal`` is the digest of the record's seal.
    """

    record: Path
    steps: int
    samples: int
    tokens: int
    first_reward: float
    last_reward: float
    weights_root: str
    seconds: float
    resumed_at: int = 0
    seal: str = ""

    def sentence(self) -> str:
        resumed = f"Resumed at step {self.resumed_at}. " if self.resumed_at else ""
        return (
            f"{resumed}{self.steps} steps, {self.samples} samples, {self.tokens} sampled tokens in"
            f" {self.seconds:.0f} s; mean reward {self.first_reward:.3f} in the first step,"
            f" {self.last_reward:.3f} in the last.\n"
            f"Final weights {self.weights_root[:16]}. Record: {self.record}\n"
            f"Seal of the record: {self.seal}"
        )

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "record": str(self.record)}


def summarize(record: RunRecord, seconds: float, resumed_at: int) -> RunSummary:
    """What a finished record says about its run, all of its steps."""
    metrics = [{name: float.fromhex(text) for name, text in entry.metrics.items()} for entry in record.steps]
    return RunSummary(
        record=record.directory,
        steps=len(metrics),
        samples=int(sum(step["rollout/samples"] for step in metrics)),
        tokens=int(sum(step["rollout/tokens"] for step in metrics)),
        first_reward=metrics[0]["reward/mean"],
        last_reward=metrics[-1]["reward/mean"],
        weights_root=record.steps[-1].weights_root,
        seconds=seconds,
        resumed_at=resumed_at,
        seal=record.seal,
    )
