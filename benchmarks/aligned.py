"""What a contract costs: rollout and train step under it and without, side by side in one run.

    python benchmarks/aligned.py [CONFIG] [--set KEY=VALUE] [--contract dense/v1] [--rounds 5]

CONFIG (configs/quickstart.toml: a 135M structure in bf16) is started twice, each time in a process of its own with its
engine and its trainer: with an empty ``alignment.contract`` and with the contract. They take their rounds in turns, so
that a busy machine disturbs both alike, and the best round of each counts. A round is the requests of the run's first
step, and one optimizer step on the answers; the first one warms up. Answers end where the model ends them, so the
rates count the tokens that there were.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Round:
    """Seconds of a rollout of so many tokens, and of a train step on so many (prompts included)."""

    tokens: int
    generate_s: float
    trained: int
    train_s: float


def serve(pipe: Connection, files: list[Path], overrides: list[str]) -> None:
    """Open both sides, then do a round whenever the other end asks for one."""
    from vime_core.config.load import load_config
    from vime_core.loop.sides import checked_policy, open_sides, ready_parts
    from vime_core.verify.live import first_requests

    config, plugins = load_config(files, overrides)
    parts = ready_parts(config, checked_policy(config, plugins), plugins)
    with open_sides(parts) as sides:
        requests = first_requests(parts, 0)
        pipe.send("ready")
        version = 0
        while pipe.recv() == "round":
            pipe.send(one_round(sides, requests, version))
            version += 1
            sides.rollout.update_weights(sides.trainer.weights(), version)


def one_round(sides: Any, requests: list[Any], version: int) -> Round:
    from vime_core.verify.live import take_step

    start = time.perf_counter()
    completions = sides.rollout.generate(requests)
    generated = time.perf_counter()
    take_step(sides, requests, completions, version)
    trained = time.perf_counter()
    tokens = sum(len(c.tokens) for c in completions)
    prompts = sum(len(r.prompt_tokens) for r in requests)
    return Round(tokens, generated - start, tokens + prompts, trained - generated)


class Side:
    """One of the two configurations in its process."""

    def __init__(self, files: list[Path], overrides: list[str]) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=serve, args=(other, files, overrides))
        self.process.start()
        other.close()
        self.pipe.recv()

    def round(self) -> Round:
        self.pipe.send("round")
        return self.pipe.recv()

    def close(self) -> None:
        self.pipe.send("end")
        self.process.join()


def table(stock: list[Round], aligned: list[Round]) -> str:
    """Best rate of each side, and how many times slower the contract is."""
    lines = [f"{'':<24}{'stock':>12}{'contract':>12}{'slower':>9}"]
    rates = {
        "rollout, tokens/s": lambda r: r.tokens / r.generate_s,
        "train step, tokens/s": lambda r: r.trained / r.train_s,
    }
    for name, rate in rates.items():
        a, b = max(map(rate, stock)), max(map(rate, aligned))
        lines.append(f"{name:<24}{a:>12.1f}{b:>12.1f}{a / b:>8.2f}x")
    a, b = (min(r.generate_s + r.train_s for r in rounds) for rounds in (stock, aligned))
    lines.append(f"{'both, seconds':<24}{a:>12.2f}{b:>12.2f}{b / a:>8.2f}x")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", type=Path, default=ROOT / "configs" / "quickstart.toml")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    parser.add_argument("--contract", default="dense/v1")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    sides: list[Side] = []
    try:
        for contract in ("", arguments.contract):
            own = [f"alignment.contract='{contract}'", f"run.output='runs/benchmark-{os.getpid()}'"]
            sides.append(Side([arguments.config], [*arguments.overrides, *own]))
        done: list[list[Round]] = [[], []]
        for number in range(arguments.rounds + 1):
            for side, rounds in zip(sides, done, strict=True):
                rounds.append(side.round())
            print(f"round {number}: {done[0][-1]} {done[1][-1]}", flush=True)
    finally:
        for side in sides:
            side.close()
    print(table(done[0][1:], done[1][1:]))


if __name__ == "__main__":
    main()
