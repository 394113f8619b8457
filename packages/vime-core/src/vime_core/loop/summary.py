"""What a finished run says about itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RunSummary:
    """``first_reward`` and ``last_reward`` are mean rewards of the first and last step."""

    record: Path
    steps: int
    samples: int
    tokens: int
    first_reward: float
    last_reward: float
    weights_root: str
    seconds: float

    def sentence(self) -> str:
        return (
            f"{self.steps} steps, {self.samples} samples, {self.tokens} sampled tokens in {self.seconds:.0f} s; mean"
            f" reward {self.first_reward:.3f} in the first step, {self.last_reward:.3f} in the last.\n"
            f"Final weights {self.weights_root[:16]}. Record: {self.record}"
        )

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "record": str(self.record)}
