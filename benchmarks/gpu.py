"""What the contract costs on a GPU: rollout, train step, weight update and whole step beside stock, in one run.

    python benchmarks/gpu.py [CONFIG ...] [--model Qwen2.5-0.5B] [--requests 1,64,256] [--rounds 3] [--set KEY=VALUE]
                             [--one-by-one] [--profile]

Stock is vLLM in its fastest mode (policy ``off``: full decode graphs, no Inductor) and Megatron's own modules with
torch's flash attention over whole packs; the contract is dense/v1 with the provider ``cuda`` under the policy
``reproducible``. Each has a process of its own with its engine and its trainer; they take turns on the same GPU, or
come one after the other (``--one-by-one``) where both do not fit, and medians are compared. A request is 64 random
tokens and 128 more; weights are random (benchmarks/shapes.py). Qwen3-4B with all layers needs ``--one-by-one`` and
``--set trainer.token_budget=2048``.

The row "train each" is a train step whose attention is one call of the flash kernel a sequence; only stock has it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from shapes import write_model

ROOT = Path(__file__).resolve().parent.parent
PROMPT, ANSWER = 64, 128
SIDES = {
    "stock": ["run.policy='off'", "alignment.contract=''"],
    "contract": ["run.policy='reproducible'", "alignment.contract='dense/v1'", "alignment.provider='cuda'"],
}


def overrides(model: Path, most: int, kv_gib: float) -> list[str]:
    return [
        "model.source='directory'", f"model.directory.path='{model}'", "rollout.context_length=1024",
        f"rollout.vllm.max_num_seqs={most}", f"rollout.vllm.kv_cache_gib={kv_gib}", "trainer.token_budget=8192",
        "trainer.lr=1e-5", f"sampling.max_tokens={ANSWER}",
    ]  # fmt: skip


def serve(pipe: Connection, files: list[Path], settings: list[str]) -> None:
    """Open both sides, then do what the other end asks for, and answer with seconds and tokens."""
    from vime_core.config.load import load_config
    from vime_core.loop.sides import checked_policy, open_sides, ready_parts

    config, plugins = load_config(files, settings)
    parts = ready_parts(config, checked_policy(config, plugins), plugins)
    with open_sides(parts) as sides:
        worker = Worker(sides)
        pipe.send(None)
        while (asked := pipe.recv()) is not None:
            name, *arguments = asked
            pipe.send(getattr(worker, name)(*arguments))


class Worker:
    """The work of one side."""

    def __init__(self, sides: Any) -> None:
        self.sides, self.version, self.step = sides, 0, 0
        self.last: tuple[list[Any], list[Any]] = ([], [])

    def rollout(self, count: int) -> float:
        """Tokens a second of ``count`` requests at once."""
        from vime_core.types import SampleRequest

        draw = random.Random(self.step)
        self.step += 1
        requests = [
            SampleRequest(i, 0, tuple(draw.randrange(3, 900) for _ in range(PROMPT)), seed=1000 * self.step + i,
                          max_tokens=ANSWER, temperature=1.0)
            for i in range(count)
        ]  # fmt: skip
        start = time.perf_counter()
        completions = self.sides.rollout.generate(requests)
        elapsed = time.perf_counter() - start
        self.last = requests, completions
        return sum(len(c.tokens) for c in completions) / elapsed

    def train(self) -> float:
        """Tokens a second of one optimizer step on the last rollout, its scoring included."""
        from vime_core.verify.live import take_step

        requests, completions = self.last
        start = time.perf_counter()
        take_step(self.sides, requests, completions, self.version)
        tokens = sum(len(r.prompt_tokens) for r in requests) + sum(len(c.tokens) for c in completions)
        return tokens / (time.perf_counter() - start)

    def train_each(self) -> float:
        """`train` with one attention call a sequence."""
        from vime_megatron import attention

        usual, attention.takes_packs = attention.takes_packs, lambda _: False
        try:
            return self.train()
        finally:
            attention.takes_packs = usual

    def update(self) -> float:
        """GB a second of a weight update."""
        self.version += 1
        size = sum(t.numel() * t.element_size() for _, t in self.sides.trainer.weights())
        start = time.perf_counter()
        self.sides.rollout.update_weights(self.sides.trainer.weights(), self.version)
        return size / 1e9 / (time.perf_counter() - start)

    def whole(self, count: int) -> float:
        """Tokens a second of rollout, optimizer step and update together."""
        start = time.perf_counter()
        self.rollout(count)
        self.train()
        self.update()
        return sum(len(c.tokens) for c in self.last[1]) / (time.perf_counter() - start)

    def profile_train(self, rows: int) -> str:
        """The kernels on which a train step spends most of the GPU's time."""
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
            start = time.perf_counter()
            self.train()
            elapsed = time.perf_counter() - start
        kernels = [event for event in found.key_averages() if str(event.device_type).endswith("CUDA")]
        kernels.sort(key=lambda event: -event.self_device_time_total)
        busy = sum(event.self_device_time_total for event in kernels) / 1e3
        lines = [f"train step {elapsed * 1e3:.0f} ms (profiled), of it kernels {busy:.0f} ms"]
        for event in kernels[:rows]:
            share = event.self_device_time_total / 1e3
            lines.append(f"  {share:>9.2f} ms {share / busy:>6.1%} {event.count:>6} x {event.key[:70]}")
        return "\n".join(lines)

    def profile_update(self) -> str:
        """Where a weight update's time goes: what the driver waits for, by call, and the rest."""
        engine, spent = self.sides.rollout.engine, dict[str, float]()
        usual = engine.call

        def timed(what: str, function: Any) -> Any:
            start = time.perf_counter()
            try:
                return usual(what, function)
            finally:
                spent[what] = spent.get(what, 0.0) + time.perf_counter() - start

        engine.call = timed
        start = time.perf_counter()
        try:
            self.update()
        finally:
            engine.call = usual
        whole = time.perf_counter() - start
        parts = [*spent.items(), ("(trainer's side)", whole - sum(spent.values()))]
        return f"update {whole * 1e3:.1f} ms: " + ", ".join(f"{name} {1e3 * t:.1f}" for name, t in parts)


class Side:
    """One configuration in its process."""

    def __init__(self, files: list[Path], settings: list[str]) -> None:
        self.pipe, other = multiprocessing.get_context("spawn").Pipe()
        self.process = multiprocessing.get_context("spawn").Process(target=serve, args=(other, files, settings))
        self.process.start()
        other.close()

    def ask(self, *what: object) -> Any:
        self.pipe.send(what)
        return self.pipe.recv()

    def close(self) -> None:
        self.pipe.send(None)
        self.process.join()


def release_cache() -> None:
    """Leave the GPU's memory to the sides."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def copy_rate() -> float:
    """GB a second that a device copy moves (bytes copied, not read plus written)."""
    import torch

    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times: list[float] = []
    for _ in range(6):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return 2**30 / 1e6 / statistics.median(times)


Measured = dict[tuple[object, ...], dict[str, list[float]]]


def measure(sides: dict[str, Side], tasks: list[tuple[object, ...]], rounds: int, measured: Measured) -> None:
    """Let the sides take turns, and keep what each round but the first gave."""
    for number in range(rounds + 1):
        for task in tasks:
            for name, side in sides.items():
                if task[0] == "train_each" and name != "stock":
                    continue
                rate = side.ask(*task)
                if number:
                    measured.setdefault(task, {}).setdefault(name, []).append(rate)
        print(f"{', '.join(sides)}: round {number} done", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="*", type=Path, default=[ROOT / "configs" / "aligned-smoke.toml"])
    parser.add_argument("--model", default="Qwen2.5-0.5B")
    parser.add_argument("--layers", type=int, help="build so many layers of the model only")
    parser.add_argument("--requests", default="1,64,256")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kv-gib", type=float, default=8.0)
    parser.add_argument("--one-by-one", action="store_true", help="never hold both sides in the GPU's memory")
    parser.add_argument(
        "--profile", action="store_true", help="also print where train step and update spend their time"
    )
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    sizes = [int(n) for n in arguments.requests.split(",")]
    tasks: list[tuple[object, ...]] = [("rollout", n) for n in sizes]
    tasks += [("train",), ("train_each",), ("update",), ("whole", min(64, max(sizes)))]
    measured: Measured = {}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / arguments.model
        start = time.perf_counter()
        write_model(arguments.model, model, arguments.layers)
        release_cache()
        print(f"weights written in {time.perf_counter() - start:.0f} s", flush=True)
        common = [*overrides(model, max(sizes), arguments.kv_gib), *arguments.overrides]
        turns = [[name] for name in SIDES] if arguments.one_by_one else [list(SIDES)]
        for names in turns:
            sides = {
                name: Side(arguments.configs, [*common, *SIDES[name], f"run.output='{folder}/{name}'"])
                for name in names
            }
            for name, side in sides.items():
                side.pipe.recv()
                print(f"{name}: ready after {time.perf_counter() - start:.0f} s", flush=True)
            measure(sides, tasks, arguments.rounds, measured)
            for name, side in sides.items() if arguments.profile else ():
                print(f"{name}: {side.ask('profile_update')}\n{name}: {side.ask('profile_train', 14)}", flush=True)
            for side in sides.values():
                side.close()
    print_table(arguments.model, measured)


def print_table(model: str, measured: Measured) -> None:
    """Medians of both sides, and what the contract's is of stock's."""
    units = {"update": "GB/s"}
    print(f"{model}, pid {os.getpid()}: medians\n{'':<28}{'stock':>12}{'contract':>12}{'ratio':>8}")
    for task, rates in measured.items():
        medians = {name: statistics.median(found) for name, found in rates.items()}
        label = " ".join(map(str, task)).replace("_", " ") + ", " + units.get(str(task[0]), "tokens/s")
        cells = [f"{medians[name]:>12.1f}" if name in medians else f"{'':>12}" for name in SIDES]
        ratio = f"{medians['contract'] / medians['stock']:>8.2f}" if len(medians) == len(SIDES) else ""
        print(f"{label:<28}{''.join(cells)}{ratio}")
    print(f"{'device copy, GB/s':<28}{copy_rate():>12.1f}", flush=True)


if __name__ == "__main__":
    main()
