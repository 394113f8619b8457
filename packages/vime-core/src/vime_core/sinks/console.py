"""One line a step on standard error: step, reward, mismatch, speed, time left."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel


class ConsoleSink:
    """Prints `line` for each step."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        print("\n".join([line(step, metrics), *warnings(metrics)]), file=sys.stderr, flush=True)

    def rewind(self, step: int) -> None:
        print(f"going on with step {step}", file=sys.stderr, flush=True)

    def close(self) -> None:
        pass


def line(step: int, metrics: Mapping[str, float]) -> str:
    """The text for one step; as in the record, the first is step 0."""
    parts = [
        f"step {step} ({step + 1} of {metrics['progress/steps']:.0f})",
        f"reward {metrics['reward/mean']:.3f}",
        f"|train - rollout log-prob| {metrics['train_rollout_logprob_abs_diff']:.3g}",
        f"loss {metrics['train/loss']:+.4f}",
        f"{metrics['time/tokens_per_s']:.0f} tokens/s",
        f"{metrics['time/step']:.1f} s",
        f"{clock(metrics['progress/left_s'])} left",
    ]
    for name in reversed([name for name in metrics if name.startswith("evaluation/") and name.endswith("/reward")]):
        parts.insert(2, f"{name.removesuffix('/reward')} {metrics[name]:.3f}")
    return "  ".join(parts)


def warnings(metrics: Mapping[str, float]) -> list[str]:
    """What a person should look at in a step."""
    found: list[str] = []
    if metrics.get("reward/flat_groups") == 1.0:
        same = metrics["reward/min"] == metrics["reward/max"]
        which = f"all rewards are {metrics['reward/max']:g}" if same else "the rewards of each prompt are all equal"
        found.append(f"  warning: {which}, so every advantage is 0 and nothing is learned in this step")
    if repeated := metrics.get("data/repeated_prompts"):
        found.append(f"  warning: {repeated:.0f} prompts of this step came more than once")
    return found


def clock(seconds: float) -> str:
    """Minutes and seconds: ``3:07``."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def open_sink(options: BaseModel, directory: Path) -> ConsoleSink:
    """The factory that the registration names."""
    del options, directory
    return ConsoleSink()
