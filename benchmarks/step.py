"""Where a step's time goes: runs a configuration, or reads a record, and prints seconds and shares by phase.

``python benchmarks/step.py configs/quickstart.toml`` or ``python benchmarks/step.py runs/quickstart``
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median


def record_of(argument: Path, scratch: Path) -> Path:
    """The record named, or that of a fresh run of the configuration named."""
    if argument.is_dir():
        return argument
    record = scratch / "record"
    subprocess.run([sys.executable, "-m", "vime_cli", "run", str(argument), "--output", str(record)], check=True)
    return record


def timings(record: Path) -> list[dict[str, float]]:
    """Seconds by phase of each step. ``record`` within a line lacks its own writing, which metrics.jsonl holds."""
    metrics = [json.loads(line) for line in (record / "metrics.jsonl").read_text().splitlines()]
    steps = [json.loads(line)["timings"] for line in (record / "steps.jsonl").read_text().splitlines()]
    pairs = zip(steps, metrics, strict=True)
    return [{**step, "record": m["time/record"], "step": m["time/step"]} for step, m in pairs]


def table(steps: list[dict[str, float]]) -> str:
    """Median seconds of each phase and its share of the median step."""
    whole = median(step["step"] for step in steps)
    phases = sorted({name for step in steps for name in step} - {"step"})
    rows = [(name, median(step.get(name, 0.0) for step in steps)) for name in phases]
    rows.append(("(other)", whole - sum(seconds for _, seconds in rows)))
    lines = [f"{name:<14} {seconds:>9.3f} s {seconds / whole:>7.2%}" for name, seconds in rows]
    return "\n".join([*lines, f"{'step':<14} {whole:>9.3f} s   median of {len(steps)} steps"])


def main() -> None:
    """Print the table for the configuration or record on the command line."""
    with tempfile.TemporaryDirectory() as scratch:
        print(table(timings(record_of(Path(sys.argv[1]), Path(scratch)))))


if __name__ == "__main__":
    main()
